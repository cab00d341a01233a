"""Locks a pool for a change of weights, and turns engines' failures into errors of the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from enginepool.engine.jobs import EngineStopped
from enginepool.engine.worker import EngineWorker
from enginepool.errors import PoolClosed, WeightUpdateFailed
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
        coming_back = [worker for worker in runtime.workers if worker.condition.recovering]
        if not workers and coming_back and not runtime.closed:
            raise WeightUpdateFailed(
                "every engine has failed and is being brought back, with the weights that the "
                "pool has; nothing was touched, try again",
                engine_index=coming_back[0].index,
            )
        if runtime.closed or not workers:
            raise runtime.dispatch.failure()
        try:
            yield workers
        except EngineStopped as error:
            if runtime.closed:
                raise PoolClosed(f"pool {runtime.name!r} was closed") from error
            raise WeightUpdateFailed(
                f"an engine failed during {call}: {error}; it comes back with the weights that the "
                "pool has, try again",
                engine_index=workers[0].index,
            ) from error


@contextmanager
def reading(runtime: Runtime, lead: EngineWorker) -> Iterator[None]:
    """A block inside `updating` that reads a source, and asks the first engine what fits it. If the
    block fails and that engine is gone, the error is about the engine.

    Raises:
        WeightUpdateFailed: The first engine has failed.
        PoolClosed: The pool was closed.
    """
    try:
        yield
    except Exception as error:
        if runtime.closed:
            raise PoolClosed(f"pool {runtime.name!r} was closed") from error
        if lead.condition.reachable:
            raise
        raise WeightUpdateFailed(
            f"engine {lead.index} failed ({lead.condition.reason}) while the source was read; "
            "nothing was touched, try again",
            engine_index=lead.index,
        ) from error
