"""Device memory given back for a while: the KV cache, or the weights."""

from __future__ import annotations

from collections.abc import Sequence

from enginepool.engine.worker import EngineWorker
from enginepool.errors import InvalidRequest
from enginepool.runtime.runtime import Runtime
from enginepool.swap.quiesce import standstill

_STOP = "kv_cache"


def release_kv_cache(runtime: Runtime, tags: Sequence[str]) -> int:
    """See `EnginePool.release_memory_occupation`."""
    if tuple(tags) != ("kv_cache",):
        raise InvalidRequest(
            f"tags={tuple(tags)!r}: expected ('kv_cache',); release_weights() releases weights"
        )

    def drop(worker: EngineWorker) -> int:
        scheduler = worker.channel.scheduler
        assert scheduler is not None
        worker.channel.stops.add(_STOP)
        return 0 if scheduler.kv_cache.dropped else scheduler.kv_cache.drop()

    with (
        runtime.steering.turn("release_memory_occupation()"),
        standstill(runtime, runtime.present(), "retract") as stand,
    ):
        runtime.kv_released = True
        return sum(stand.run(drop).values())


def resume_kv_cache(runtime: Runtime) -> int:
    """See `EnginePool.resume_memory_occupation`."""

    def rebuild(worker: EngineWorker) -> int:
        scheduler = worker.channel.scheduler
        assert scheduler is not None
        made = scheduler.kv_cache.rebuild()
        worker.channel.stops.discard(_STOP)
        return made

    with (
        runtime.steering.turn("resume_memory_occupation()"),
        standstill(runtime, runtime.present(), "in_place") as stand,
    ):
        runtime.kv_released = False
        return sum(stand.run(rebuild).values())


def release_weights(runtime: Runtime) -> int:
    """See `EnginePool.release_weights`."""
    reason = "release_weights() gave them back; update_weights() brings new ones"

    def drop(worker: EngineWorker) -> int:
        scheduler = worker.channel.scheduler
        assert scheduler is not None
        leaves = scheduler.leaves
        had = set(leaves).difference(leaves.lost())
        leaves.drop(list(had))
        worker.unload(reason)
        return sum(leaves.specs[path].size * leaves.specs[path].dtype.itemsize for path in had)

    with (
        runtime.steering.turn("release_weights()"),
        standstill(runtime, runtime.present(), "retract") as stand,
    ):
        runtime.released = reason
        return sum(stand.run(drop).values())
