"""A device that raises or does not answer in time is found."""

import threading
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from enginepool.engine.device_check import no_answer
from tests.support import faults
from tests.support.liveness import SECONDS


@pytest.fixture
def dead() -> Iterator[set[int]]:
    with faults.dead_devices() as devices:
        yield devices


def test_a_device_that_raises(dead: set[int]) -> None:
    """The other devices answer."""
    dead.add(jax.devices()[1].id)
    assert no_answer(jax.devices()[:1], SECONDS) is None
    said = no_answer(jax.devices()[:3], SECONDS)
    assert said is not None
    assert said.startswith("device 1 does not answer any more (INTERNAL: CUDA_ERROR")
    assert said.endswith("; only a new process can use it again")


def test_a_device_without_memory_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rebuild of its engine frees memory."""

    def put(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4 bytes.")

    monkeypatch.setattr(jax, "device_put", put)
    assert no_answer(jax.devices()[:1], SECONDS) is None


def test_a_device_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller does not hang."""
    let_go, begun = threading.Event(), threading.Event()

    def put(*_: Any, **__: Any) -> None:
        begun.set()
        let_go.wait()

    monkeypatch.setattr(jax, "device_put", put)
    said = no_answer(jax.devices()[:2], 0.01)
    let_go.set()
    assert begun.wait(SECONDS)
    assert said is not None
    assert said.startswith("one of the devices [0, 1] has not answered for 0.01 s")
