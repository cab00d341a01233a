"""Decode steps that stay on the device, and the same pool without them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.faults import scheduler_of
from enginepool import EnginePool


def steps(pool: EnginePool) -> tuple[int, int]:
    """Decode steps so far: those that stayed on their device, and upstream's own."""
    engines = pool.stats()["engines"]
    return tuple(sum(e[key] for e in engines) for key in ("steady_steps", "fallback_steps"))


@contextmanager
def upstreams_own(pool: EnginePool) -> Iterator[None]:
    """All decode steps are upstream's own, of a pool that rests now and when the block ends."""
    steady = [scheduler_of(pool, index).steady for index in range(len(pool.engines))]
    programs = [one._program for one in steady]
    for one in steady:
        one._program = None
    try:
        yield
    finally:
        for one, program in zip(steady, programs, strict=True):
            one._program = program


@contextmanager
def joins() -> Iterator[list[int]]:
    """How many requests join a flight meanwhile, each time."""
    from enginepool.engine.steady.flight import Flight

    counts: list[int] = []
    join = Flight.join

    def counting(self: Any, reqs: list[Any]) -> None:
        counts.append(len(reqs))
        join(self, reqs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Flight, "join", counting)
        yield counts
