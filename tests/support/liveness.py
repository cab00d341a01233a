"""Waiting for a state that only a look from outside can tell. The time limit is only for dead
pools."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from enginepool import EnginePool
from tests.support.faults import Hang, hang_in_step

SECONDS = 120.0


def until(condition: Callable[[], Any], seconds: float = SECONDS) -> None:
    """Return when the condition holds. Fail if it never does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this state was not reached"
        time.sleep(0.01)


def running(pool: EnginePool) -> int:
    return sum(load["running"] for load in pool.get_load())


def waiting(pool: EnginePool) -> int:
    return pool.stats()["waiting"]


def at_rest(pool: EnginePool) -> bool:
    """No engine holds a request, or KV cache that the prefix cache cannot evict. All ended
    outputs are counted."""
    empty = all(load["running"] == load["kv_used_tokens"] == 0 for load in pool.get_load())
    return empty and idle(pool)


def idle(pool: EnginePool) -> bool:
    """No engine steps before it gets work. After its last output each engine has one more
    iteration, in which it finds no work."""
    workers = pool.runtime.workers
    return not any(w.condition.stepping_since or w.channel.has_work() for w in workers)


def has_jobs(pool: EnginePool) -> bool:
    """Every engine has a job at its next step boundary."""
    return all(worker.channel.has_jobs() for worker in pool.runtime.workers)


@contextmanager
def hanging_in_steps(pool: EnginePool, at: int = 1) -> Iterator[list[Hang]]:
    """Every engine hangs in its step number `at` from now, until `let_go` or the end of the
    block. The block must give every engine that many steps."""
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
    """Threads for blocking calls."""
    with ThreadPoolExecutor(count, thread_name_prefix="caller") as executor:
        yield executor
