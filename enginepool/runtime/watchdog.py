"""Finds a step that does not return. `recovery.py` decides what happens to its engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from enginepool.engine.recovery import Recovery
from enginepool.engine.worker import EngineWorker


@contextmanager
def watching(
    name: str, workers: Sequence[EngineWorker], step_timeout: float, recovery: Recovery
) -> Iterator[None]:
    """Inside the block, abandon each engine whose step takes longer than `step_timeout` seconds.

    It looks at least ten times in `step_timeout`. So it finds a stuck step at most a tenth of
    `step_timeout` late.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(min(step_timeout / 10, 30.0)):
            for worker in workers:
                since = worker.condition.stepping_since
                if since is not None and (took := time.perf_counter() - since) > step_timeout:
                    reason = f"a step has not returned for {took:.1f} s ({step_timeout=})"
                    recovery.engine_stuck(worker, since, reason)

    thread = threading.Thread(target=watch, name=f"{name}-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
