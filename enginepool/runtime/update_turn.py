"""A turn to change weights, with the engines that are there, and what their failures are to the
caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from enginepool.engine.jobs import EngineStopped
from enginepool.engine.worker import EngineWorker
from enginepool.errors import PoolClosed, WeightUpdateFailed
from enginepool.runtime.runtime import Runtime


@contextmanager
def updating(runtime: Runtime, call: str) -> Iterator[list[EngineWorker]]:
    """A turn to change weights, with the engines whose loops run.

    Args:
        call: What takes the turn, as a user calls it.

    Raises:
        WeightUpdateFailed: They all fail just now, or one did meanwhile.
        PoolClosed, PoolFailed: There is none.
    """
    with runtime.steering.turn(call), runtime.cache.sharing():
        workers = runtime.reachable()
        coming_back = [worker for worker in runtime.workers if worker.condition.returns]
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
                f"{error} since the update began; it comes back with the weights that the pool "
                "has, try again",
                engine_index=workers[0].index,
            ) from error
