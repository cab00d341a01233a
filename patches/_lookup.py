"""How a patch reaches the parts of upstream and of JAX that it changes."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Sequence
from typing import Any

from patches import _imports
from patches._patch import JaxChanged

# The parameters that all of upstream's rotary embeddings have.
ROTARY_PARAMETERS = (
    *("self", "head_size", "rotary_dim", "max_position_embeddings"),
    *("base", "is_neox_style", "dtype"),
)


def with_globals(function: Any, **names: Any) -> Any:
    """Return a copy of a plain function that sees other module globals under these names.

    A probe runs upstream's own code with it, without a device. The module itself stays as it is:
    other threads use it.
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


def constructed(owner: Any, constructor: Any, *args: Any) -> Any:
    """Return an object of this class, made by this constructor and not by the class's own."""
    made = owner.__new__(owner)
    constructor(made, *args)
    return made


class ModuleProxy:
    """A module with other functions in the place of some of its own."""

    def __init__(self, original: types.ModuleType, **functions: Any) -> None:
        self._original = original
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def module(name: str) -> Any:
    """Return a module. One of upstream is imported without its effects on the process."""
    return (
        _imports.import_quietly(name)
        if name.startswith("sgl_jax")
        else importlib.import_module(name)
    )


def of_jax(name: str, attribute: str, parameters: Sequence[str]) -> Any:
    """Return a private function of JAX that has these parameters first.

    Raises:
        JaxChanged: JAX has no such function.
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
