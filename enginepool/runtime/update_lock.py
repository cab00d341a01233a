"""Locks a pool for a change of weights. If an engine fails, the call raises a public error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from enginepool.engine.jobs import EngineStopped
from enginepool.engine.worker import EngineWorker
from enginepool.runtime.runtime import Runtime


@contextmanager
def updating(runtime: Runtime, call: str) -> Iterator[list[EngineWorker]]:
    """Hold the steering lock and share compiled programs inside the block. Yields the engines whose
    loops run.

    Args:
        call: The user's call that changes weights.

    Raises:
        WeightUpdateFailed: All engines have failed and will come back, or one failed inside the
            block.
        PoolClosed, PoolFailed: No engine is left.
    """
    with runtime.steering.hold(call), runtime.cache.sharing():
        workers = runtime.reachable()
        if not workers:
            raise runtime.failure()
        try:
            yield workers
        except EngineStopped as error:
            failed = [worker for worker in workers if not worker.condition.reachable]
            raise runtime.failure(failed) from error


@contextmanager
def reading(runtime: Runtime, lead: EngineWorker) -> Iterator[None]:
    """A block inside `updating` that reads a source, and asks the first engine what fits it. If the
    block fails and that engine is gone, the error is about the engine.

    Raises:
        WeightUpdateFailed: The first engine has failed.
        PoolClosed, PoolFailed: No engine is left.
    """
    try:
        yield
    except Exception as error:
        if runtime.closed or not lead.condition.reachable:
            raise runtime.failure([lead]) from error
        raise
