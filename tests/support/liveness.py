"""Waiting for a state that only a look from outside can tell; the bound is for a dead pool only."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from enginepool import EnginePool
from tests.support.faults import Hang, hang_in_step

SECONDS = 120.0


def until(condition: Callable[[], Any], seconds: float = SECONDS) -> None:
    """Return when the condition holds; fail when it never does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this state was not reached"
        time.sleep(0.01)


def running(pool: EnginePool) -> int:
    return sum(load["running"] for load in pool.get_load())


def waiting(pool: EnginePool) -> int:
    return pool.stats()["waiting"]


def at_rest(pool: EnginePool) -> bool:
    """No engine holds a request, or KV cache that the prefix cache could not give back; all that
    ended has been counted."""
    empty = all(load["running"] == load["kv_used_tokens"] == 0 for load in pool.get_load())
    return empty and idle(pool)


def idle(pool: EnginePool) -> bool:
    """No engine steps, nor will it before it is asked for something: after its last output each
    has one more iteration, in which it finds nothing to do."""
    workers = pool.runtime.workers
    return not any(w.condition.stepping_since or w.channel.has_work() for w in workers)


def has_jobs(pool: EnginePool) -> bool:
    """Every engine has something to do at its next step boundary."""
    return all(worker.channel.has_jobs() for worker in pool.runtime.workers)


@contextmanager
def hanging_in_steps(pool: EnginePool, at: int = 1) -> Iterator[list[Hang]]:
    """Every engine hangs in its so-manieth step from now, until `let_go` or the end of the block.
    For a block that gives every engine so many."""
    hangs = [hang_in_step(pool, index, at) for index in range(len(pool.engines))]
    try:
        yield hangs
    finally:
        let_go(hangs)


def let_go(hangs: list[Hang]) -> None:
    for hang in hangs:
        hang.set()


def all_hang(hangs: list[Hang]) -> bool:
    return all(hang.begun.is_set() for hang in hangs)


@contextmanager
def paused(pool: EnginePool, mode: Any = "in_place") -> Iterator[None]:
    pool.pause_generation(mode)
    try:
        yield
    finally:
        if not pool.closed:
            pool.continue_generation()


@contextmanager
def callers(count: int = 8) -> Iterator[ThreadPoolExecutor]:
    """Threads for calls that wait."""
    with ThreadPoolExecutor(count, thread_name_prefix="caller") as executor:
        yield executor
