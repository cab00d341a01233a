"""A thread that looks for steps which do not return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from enginepool.engine.worker import EngineWorker


@contextmanager
def watching(
    name: str,
    workers: Sequence[EngineWorker],
    step_timeout: float,
    on_stuck: Callable[[EngineWorker, float, str], None],
) -> Iterator[None]:
    """Call `on_stuck(worker, since, reason)` for engines whose step takes longer.

    Looks ten times in `step_timeout`, so a step is found stuck up to a tenth of it late. Ends
    with the block.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(min(step_timeout / 10, 30.0)):
            for worker in workers:
                since = worker.channel.stepping_since
                if since is not None and (took := time.perf_counter() - since) > step_timeout:
                    reason = f"a step has not returned for {took:.1f} s ({step_timeout=})"
                    on_stuck(worker, since, reason)

    thread = threading.Thread(target=watch, name=f"{name}-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
