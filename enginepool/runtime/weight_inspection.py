"""Looks at engines' weights: checksums, and one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from enginepool.errors import EnginesDiffer, InvalidRequest, NoWeights
from enginepool.runtime.runtime import Runtime
from enginepool.runtime.staging import Staged
from enginepool.values import is_int, plain, shown
from enginepool.weights.arrays import lost
from enginepool.weights.fingerprint import fingerprints
from enginepool.weights.plan import Plan

if TYPE_CHECKING:
    from enginepool.engine.worker import EngineWorker


def checksum(runtime: Runtime) -> str:
    """See `EnginePool.checksum`."""

    def read() -> str:
        weights = _arrays(runtime)
        with runtime.cache.sharing():
            sums = fingerprints(list(weights.values()))
        return _one(dict(zip(weights, sums, strict=True)))

    return _outside_updates(runtime, "checksum()", read)


def quick_checksum(runtime: Runtime) -> float:
    """See `EnginePool.quick_checksum`."""

    def read() -> float:
        sums = {}
        for index, leaves in _arrays(runtime).items():
            first = [np.asarray(leaves[path]).reshape(-1)[:1024] for path in list(leaves)[:4]]
            sums[index] = float(sum(part.astype(np.float32).sum() for part in first))
        return _one(sums)

    return _outside_updates(runtime, "quick_checksum()", read)


class _UnderWay(Exception):
    """An update replaces the engines' weights."""


def _outside_updates[T](runtime: Runtime, call: str, read: Callable[[], T]) -> T:
    """Read the engines' weights. If an update replaces them, or if they differ or are missing, wait
    for the end of the update, and read them then."""
    steering = runtime.steering
    if steering.inside() is not None:  # this is the update's own thread
        return read()
    with suppress(_UnderWay, EnginesDiffer, NoWeights):
        return read()
    with steering.hold(call):
        return read()


def swap_fingerprints(
    runtime: Runtime, plan: Plan, swapped: Sequence[EngineWorker], staged: Mapping[int, Staged]
) -> tuple[str, str, dict[int, str]]:
    """The fingerprint of what was staged, of the source before it was quantized, and of each engine
    that has the weights, by engine index.

    Raises:
        WeightUpdateFailed, PoolFailed, PoolClosed: Every engine has failed since.
    """
    while swapped:
        lead = swapped[0]
        try:
            new = staged[lead.index].arrays
            sets = [{**lead.leaves, **new}, plan.unquantized(new)]
            wanted, source, *have = fingerprints([*sets, *(worker.leaves for worker in swapped)])
            return (
                wanted,
                source,
                dict(zip([worker.index for worker in swapped], have, strict=True)),
            )
        except (LookupError, RuntimeError):
            # An engine has failed since. It comes back with the new weights.
            readable = [worker for worker in swapped if not worker.leaves.lost()]
            if readable == swapped:
                raise
            swapped = readable
    raise runtime.failure()


def by_name(runtime: Runtime, name: str, truncate_size: int) -> list[Any]:
    """See `EnginePool.get_weights_by_name`."""
    name, truncate_size = plain(name), plain(truncate_size)
    if not isinstance(name, str):
        raise InvalidRequest(f"name={shown(name)}: expected a string")
    if not (is_int(truncate_size) and truncate_size >= 0):
        raise InvalidRequest(f"truncate_size={shown(truncate_size)}: expected a count, 0 or more")

    def read() -> list[Any]:
        worker, arrays = of_one(runtime)
        mapping, leaves = worker.scheduler.hugging_face, worker.leaves
        path = mapping.paths.get(name, name)
        if path not in leaves.specs and path not in leaves.source_specs:
            raise InvalidRequest(f"{name}: neither a Hugging Face name nor a leaf of this model")
        array = leaves.on_host(path, arrays)
        if name in mapping.paths:
            if len(group := mapping.names[path]) > 1:  # stacked experts
                array = array[group.index(name)]
            if mapping.turned(path):
                array = array.swapaxes(-1, -2)
        return array[:truncate_size].astype(np.float32).tolist()

    return _outside_updates(runtime, "get_weights_by_name()", read)


def of_one(runtime: Runtime) -> tuple[EngineWorker, dict[str, jax.Array]]:
    """The first engine whose loop runs, and its leaves."""
    index, arrays = next(iter(_arrays(runtime).items()))
    return runtime.workers[index], arrays


def _arrays(runtime: Runtime) -> dict[int, dict[str, jax.Array]]:
    """The leaves of every engine. They stay as they are, also if an update drops some meanwhile.

    Raises:
        NoWeights: An engine has none.
        PoolClosed, PoolFailed, WeightUpdateFailed: No engine's loop runs.
    """
    update, workers = runtime.desired.update, runtime.reachable()
    if not workers:
        raise runtime.failure()
    arrays: dict[int, dict[str, jax.Array]] = {}
    for worker in workers:
        with suppress(LookupError):  # the engine is taken apart at this moment
            arrays[worker.index] = dict(worker.leaves)
        if worker.index not in arrays or lost(arrays[worker.index]):
            reason = worker.condition.reason
            raise NoWeights(f"engine {worker.index} has no weights: {reason}")
    swapping = any("swap" in worker.condition.pause_reasons for worker in workers)
    if runtime.steering.inside() is None and (swapping or runtime.desired.update != update):
        raise _UnderWay  # some of these leaves may be old and some new
    return arrays


def _one(sums: dict[int, Any]) -> Any:
    if len(set(map(repr, sums.values()))) > 1:  # NaN is not equal to itself, but its text is
        listed = ", ".join(f"engine {index}: {value}" for index, value in sums.items())
        raise EnginesDiffer(f"the engines' weights differ: {listed}", checksums=sums)
    return next(iter(sums.values()))
