"""Waiting for a state that only a look from outside can tell; the bound is for a dead pool only."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from enginepool import EnginePool

SECONDS = 120.0


def until(condition: Callable[[], Any], seconds: float = SECONDS) -> None:
    """Return when the condition holds; fail when it never does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this state was not reached"
        time.sleep(0.01)


def running(pool: EnginePool) -> int:
    return pool.stats()["running"]


def waiting(pool: EnginePool) -> int:
    return pool.stats()["waiting"]


def at_rest(pool: EnginePool) -> bool:
    """No engine holds a request, or KV cache that the prefix cache could not give back."""
    return all(load["running"] == load["kv_used_tokens"] == 0 for load in pool.get_load())


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
