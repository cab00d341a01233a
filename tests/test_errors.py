"""An exception of one process can be raised in another, because trainers and engines may be in
different processes."""

import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from enginepool import errors
from enginepool.errors import EnginePoolError, RequestFailed, RequestsFailed


def everything(kind: type[Exception] = EnginePoolError) -> Iterator[type[Exception]]:
    yield kind
    for below in kind.__subclasses__():
        yield from everything(below)


def example(kind: type[Exception]) -> Exception:
    """An exception with a value in every argument. The value is a list of strings, which can be
    counted, iterated and compared."""
    if not inspect.isfunction(kind.__init__):  # Python's own constructor
        return kind("what went wrong")
    parameters = list(inspect.signature(kind).parameters.values())
    positional = [
        "what went wrong" if parameter.name == "message" else ["some", "data"]
        for parameter in parameters
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    named = {p.name: ["of", p.name] for p in parameters if p.kind is p.KEYWORD_ONLY}
    return kind(*positional, **named)


@pytest.mark.parametrize("kind", list(everything()), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_every_exception_keeps_its_data(kind: type[Exception], again: Any) -> None:
    error = example(kind)
    error.add_note("seen on another host")
    other = again(error)
    assert type(other) is kind
    assert str(other) == str(error)
    assert other.args == error.args
    assert vars(other) == vars(error)
    assert other.__notes__ == ["seen on another host"]


def test_a_group_keeps_its_errors_and_results() -> None:
    group = RequestsFailed(
        "1 of 2 outputs ended early", [RequestFailed("it", prompt_index=1, err_type="timeout")]
    )
    group.results = [{"text": "7"}, {"text": ""}]
    other = pickle.loads(pickle.dumps(group))
    assert (str(other), other.results) == (str(group), group.results)
    assert isinstance(other, RequestsFailed)
    (failed,) = other.exceptions
    assert (failed.prompt_index, failed.err_type) == (1, "timeout")
    assert str(failed) == "prompt 1: it"


def test_the_hierarchy_is_all_there_is() -> None:
    """A new exception is an EnginePoolError, so the test above covers it."""
    here = {kind for kind in vars(errors).values() if inspect.isclass(kind)}
    raised = {kind for kind in here if issubclass(kind, BaseException)}
    assert raised == {*everything()} & raised | {RequestsFailed}
