"""Checks for parts of upstream that it does not promise to keep. The error names a missing part."""

from __future__ import annotations

import inspect
from typing import Any

from enginepool.errors import EnginePoolError


def expect(holder: Any, *names: str, remedy: str = "") -> None:
    """
    Raises:
        EnginePoolError: The class, module or object lacks one of these attributes.
    """
    for name in names:
        if not hasattr(holder, name):
            raise _changed(f"{_named(holder)} has no {name}", remedy)


def expect_parameters(function: Any, *parameters: str, remedy: str = "") -> None:
    """
    Raises:
        EnginePoolError: The function takes other parameters; a method's `self` does not count.
    """
    found = tuple(name for name in inspect.signature(function).parameters if name != "self")
    if found != parameters:
        takes = f"takes ({', '.join(found)}), expected ({', '.join(parameters)})"
        raise _changed(f"{function.__qualname__} {takes}", remedy)


def _named(holder: Any) -> str:
    return getattr(holder, "__name__", type(holder).__name__)


def _changed(what: str, remedy: str) -> EnginePoolError:
    remedy = remedy or "install a version of sglang-jax that README.md names as tested"
    return EnginePoolError(f"this sglang-jax is unlike what enginepool knows: {what}; {remedy}")
