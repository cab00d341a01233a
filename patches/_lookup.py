"""How a patch looks at the parts of upstream and of JAX that it is about."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Sequence
from typing import Any

from patches import _imports
from patches._patch import JaxChanged


def with_globals(function: Any, **names: Any) -> Any:
    """Return a copy of a plain function that sees other module globals under these names.

    This is how a probe looks at upstream's own code without a device, and without touching
    the module that other threads are using.
    """
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def module(name: str) -> Any:
    """Return an upstream module, imported without its side effects on the process."""
    return (
        _imports.import_quietly(name)
        if name.startswith("sgl_jax")
        else importlib.import_module(name)
    )


def of_jax(name: str, attribute: str, parameters: Sequence[str]) -> Any:
    """A private function of JAX, whose first parameters are these.

    Raises:
        JaxChanged: There is none.
    """
    try:
        function = getattr(importlib.import_module(name), attribute)
        found = list(inspect.signature(function).parameters)
    except (ImportError, AttributeError, TypeError, ValueError) as exc:
        raise JaxChanged(f"{name}.{attribute}: {exc}") from exc
    if found[: len(parameters)] != list(parameters):
        wanted = ", ".join(parameters)
        raise JaxChanged(
            f"{name}.{attribute}: expected parameters ({wanted}, …), found ({', '.join(found)})"
        )
    return function
