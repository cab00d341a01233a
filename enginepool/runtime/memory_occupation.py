"""Releases the device memory of the KV cache or of the weights for a while."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from enginepool.engine.worker import EngineWorker
from enginepool.errors import EnginePoolError, InvalidRequest
from enginepool.runtime.quiesce import EngineGroup, quiesced
from enginepool.runtime.runtime import Runtime
from enginepool.values import plain, shown


def release_kv_cache(runtime: Runtime, tags: Sequence[str]) -> int:
    """See `EnginePool.release_memory_occupation`."""
    given = plain(tags)
    if not isinstance(given, Collection) or list(given) != ["kv_cache"]:
        raise InvalidRequest(
            f"tags={shown(tags)}: expected ('kv_cache',); release_weights() releases weights"
        )

    def drop(worker: EngineWorker) -> int:
        worker.pause("kv_cache")
        return worker.scheduler.kv_cache.drop()

    with (
        runtime.steering.hold("release_memory_occupation()"),
        quiesced(runtime, runtime.reachable(), "retract") as engines,
    ):
        runtime.desired.pause_reasons.add("kv_cache")
        return sum(engines.run(drop).values())


def resume_kv_cache(runtime: Runtime) -> int:
    """See `EnginePool.resume_memory_occupation`."""

    def rebuild(worker: EngineWorker) -> int:
        try:
            made = worker.scheduler.kv_cache.rebuild()
        except Exception as error:
            raise EnginePoolError(
                f"engine {worker.index} could not allocate its KV cache again: {error}; free "
                "memory on its device and call resume_memory_occupation() again"
            ) from error
        worker.go_on("kv_cache")
        return made

    with (
        runtime.steering.hold("resume_memory_occupation()"),
        quiesced(runtime, runtime.reachable(), "in_place") as engines,
    ):
        runtime.desired.pause_reasons.discard("kv_cache")
        return sum(engines.run(rebuild).values())


@contextmanager
def without_kv_caches(engines: EngineGroup) -> Iterator[dict[int, int]]:
    """Release the KV caches of stopped engines inside the block. One that was released before stays
    released, until `resume_kv_cache`.

    Yields the bytes that were released, by engine index.
    """
    dropped: dict[int, int] = {}

    def drop(worker: EngineWorker) -> None:
        dropped[worker.index] = worker.scheduler.kv_cache.drop()

    def rebuild(worker: EngineWorker) -> None:
        if dropped.get(worker.index):
            worker.rebuild_kv_cache()

    try:
        engines.run(drop)
        yield dropped
    finally:
        engines.run(rebuild)


def release_weights(runtime: Runtime) -> int:
    """See `EnginePool.release_weights`."""
    reason = "release_weights() gave them back; update_weights() brings new ones"

    def drop(worker: EngineWorker) -> int:
        leaves = worker.leaves
        had = set(leaves).difference(leaves.lost())
        leaves.drop(list(had))
        worker.unload(reason)
        return sum(leaves.specs[path].size * leaves.specs[path].dtype.itemsize for path in had)

    with (
        runtime.steering.hold("release_weights()"),
        quiesced(runtime, runtime.reachable(), "retract") as engines,
    ):
        runtime.desired.no_weights = reason
        return sum(engines.run(drop).values())
