"""Drops a scheduler's requests, and the scheduler itself.

Reaches into upstream's scheduler, worker and model runner.

What breaks: A failed step leaves requests and KV pages. A dropped scheduler keeps its arrays.
Why: Upstream ends the process after an error, and leaves the rest to the garbage collector.
Remove when: A scheduler can be emptied and closed.
"""

from __future__ import annotations

from typing import Any


def release_all(scheduler: Any) -> None:
    """Drop every request and free all KV pages and slots. The prefix cache is empty afterwards.

    A failed step may have left any state. Upstream's own pause would lose requests that were
    prefilled but have not joined the running batch.
    """
    scheduler.waiting_queue = []
    scheduler.chunked_reqs = [None] * len(scheduler.chunked_reqs)
    scheduler.last_batch = scheduler.cur_batch = None
    # Upstream's flush makes a new running batch, unless the old one has requests.
    scheduler.running_batch = None
    flushed, why, _ = scheduler.flush_cache()
    if not flushed:
        raise RuntimeError(why)


def dispose(scheduler: Any) -> None:
    """Drop everything, even what a constructor made before it failed.

    Scheduler, worker and model runner refer to each other. Clearing them frees the arrays at once;
    a garbage collection would stop the other engines.
    """
    worker = getattr(scheduler, "tp_worker", None)
    if (leaves := getattr(scheduler, "leaves", None)) is not None:
        leaves.forget()
    parts: list[Any] = [scheduler]
    if worker is not None:
        parts += [worker, worker.model_runner]
    for part in parts:
        vars(part).clear()
