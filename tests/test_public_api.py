"""The names that enginepool promises."""

import inspect
import re
from collections import Counter
from pathlib import Path

import enginepool
import patches
from enginepool import EnginePool, EnginePoolError, errors

# Sync methods that never wait have no async twin.
IMMEDIATE = {"open", "close", "stats", "get_load", "events", "front_end"}
NO_ERRORS = {"AdapterReport", "EnginePool", "StagedAdapter", "StagedWeights", "SwapReport"}


def public(thing: object) -> list[str]:
    return [name for name in vars(thing) if not name.startswith("_")]


def test_all_is_sorted_and_complete() -> None:
    """`__all__` is sorted, every name in it exists, and no public class is missing."""
    assert enginepool.__all__ == sorted(enginepool.__all__)
    for name in enginepool.__all__:
        assert getattr(enginepool, name) is not None
    classes = {name for name, value in vars(enginepool).items() if inspect.isclass(value)}
    assert classes == set(enginepool.__all__)
    assert {name for name in public(errors) if inspect.isclass(getattr(errors, name))} - {
        "Any",
        "Sequence",
    } == set(enginepool.__all__) - NO_ERRORS


def test_errors() -> None:
    """Every error derives from EnginePoolError, except the group of several errors. Bad input is
    also a ValueError. The tree in the module's docstring has all of them."""
    for name in set(enginepool.__all__) - NO_ERRORS:
        error = getattr(enginepool, name)
        assert name in (errors.__doc__ or "")
        assert error.__doc__
        if name == "RequestsFailed":
            assert issubclass(error, ExceptionGroup)
        else:
            assert issubclass(error, EnginePoolError)
        assert issubclass(error, ValueError) == name.startswith("Invalid")


def test_async_twins() -> None:
    """Every method that waits has an async twin with the same arguments, except the progress
    bar. Every public method has a docstring."""
    methods = {
        name: method
        for cls in reversed(EnginePool.__mro__[:-1])
        for name, method in vars(cls).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
    assert all(method.__doc__ for method in methods.values())
    sync = {n for n in methods if not n.startswith("async_") and n not in IMMEDIATE | {"aclose"}}
    assert {f"async_{name}" for name in sync} == {n for n in methods if n.startswith("async_")}
    for name in sync:
        one = dict(inspect.signature(methods[name]).parameters)
        one.pop("progress", None)
        assert one == dict(inspect.signature(methods[f"async_{name}"]).parameters), name
    assert {name for name in methods if name.startswith("generate")} == {"generate", "generate_all"}


def test_no_two_classes_have_one_name() -> None:
    """So a class name in an error, a log or a review is unambiguous."""
    files = [
        file
        for folder in (enginepool, patches)
        for file in Path(str(folder.__file__)).parent.rglob("*.py")
    ]
    names = re.findall(r"^class (\w+)", "\n".join(map(Path.read_text, files)), re.MULTILINE)
    assert not [name for name, count in Counter(names).items() if count > 1]
