"""Getting a plan's leaves onto engines' devices: two sets for a while, or one leaf at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from enginepool.engine.jobs import EngineStopped
from enginepool.engine.worker import EngineWorker
from enginepool.errors import EnginePoolError, WeightUpdateFailed
from enginepool.logs import logger
from enginepool.swap.quiesce import Standstill
from enginepool.weights.placement import free_bytes, lies_there, place
from enginepool.weights.plan import Piece, Plan

if TYPE_CHECKING:
    from enginepool.weights.leaves import EngineLeaves


@dataclass
class Staged:
    """New leaves of one engine, on its device.

    Attributes:
        shared: Those that are the source's own buffers.
    """

    arrays: dict[str, jax.Array] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)


def leaves_of(worker: EngineWorker) -> EngineLeaves:
    leaves = worker.channel.leaves
    assert leaves is not None, "the engine was never built"
    return leaves


def choose(plan: Plan, workers: Sequence[EngineWorker], copy: bool) -> str:
    """ "double" where a second set fits on every device, else "stream"."""
    for worker in workers:
        arriving = plan.arriving(leaves_of(worker).specs, copied=copy)
        for device in worker.devices:
            free = free_bytes(device)
            if free is not None and arriving // len(worker.devices) > free:
                return "stream"
    return "double"


def stage(plan: Plan, workers: Sequence[EngineWorker], copy: bool) -> dict[int, Staged]:
    """Put every new leaf on every engine's device; no engine is touched.

    Raises:
        WeightUpdateFailed: With the engine and the leaf.
        InvalidWeights: From a stream.
    """
    staged = {worker.index: Staged() for worker in workers}
    for piece in plan.pieces():
        for worker, array, shared in _everywhere(plan, piece, workers, copy):
            mine = staged[worker.index]
            mine.arrays[piece.path] = array
            if shared:
                mine.shared.add(piece.path)
        del piece  # or it would live on while the next tensor is read
    for worker in workers:
        for path, array in staged[worker.index].arrays.items():
            with naming(worker, path):
                array.block_until_ready()
    return staged


def _everywhere(
    plan: Plan, piece: Piece, workers: Sequence[EngineWorker], copy: bool
) -> Iterator[tuple[EngineWorker, jax.Array, bool]]:
    first = None
    for worker in workers:
        spec = leaves_of(worker).specs[piece.path]
        assert spec.sharding is not None
        with naming(worker, piece.path):
            if first is None:
                piece = plan.whole(piece, spec)
            if first is None or lies_there(piece.array, spec.sharding):
                array, shared = plan.make(piece, spec, copy=copy)
            else:
                array, shared = place(first, spec.sharding, spec.dtype), False
        if first is None:
            first = array
        yield worker, array, shared


def stream(plan: Plan, stand: Standstill, copy: bool) -> tuple[dict[int, Staged], dict[int, str]]:
    """Replace the leaves of standing engines one by one: never more than a set and a leaf.

    The first engine gets them from the source, the others from the first, but for what lies on
    their own devices. Until the first is whole, a failure puts its old weights back from a
    sibling; from then on an engine that fails is left without weights.

    Returns:
        What each engine got, and why others got nothing.
    """
    lead, *others = stand.workers
    counts = {worker.index: Staged() for worker in stand.workers}
    usable = not leaves_of(lead).lost()
    touched: list[str] = []
    try:
        for piece in plan.pieces():
            touched.append(piece.path)
            make = functools.partial(plan.make, piece, copy=copy)
            if _exchange(lead, piece.path, make):
                counts[lead.index].shared.add(piece.path)
            del piece, make
    except BaseException as error:
        if usable:
            _restore(lead, others, touched, error)
        raise
    failed = {}
    for worker in others:
        try:
            again = plan.again(leaves_of(lead), leaves_of(worker).specs)
            for piece in again.pieces():
                make = functools.partial(again.make, piece, copy=copy)
                if _exchange(worker, piece.path, make):
                    counts[worker.index].shared.add(piece.path)
        except Exception as error:
            failed[worker.index] = f"it missed an update of weights: {error}"
            logger().warning(
                "enginepool.weights_not_updated", engine=worker.index, error=str(error)
            )
    for worker in stand.workers:
        counts[worker.index].arrays = {p: leaves_of(worker)[p] for p in plan.paths}
    return counts, failed


def _exchange(
    worker: EngineWorker, path: str, make: Callable[[Any], tuple[jax.Array, bool]]
) -> bool:
    """Drop one leaf, then make it anew; both on the engine's books at its step boundary."""
    leaves = leaves_of(worker)
    worker.channel.run(lambda: leaves.drop([path]) and None).result()
    with naming(worker, path):
        array, shared = make(leaves.specs[path])
        array.block_until_ready()
    mine = [path] if shared else []
    worker.channel.run(lambda: leaves.replace({path: array}, mine) and None).result()
    return shared


def _restore(
    lead: EngineWorker, others: Sequence[EngineWorker], paths: Sequence[str], error: BaseException
) -> None:
    """Give the first engine the old weights back; where that fails too, it is left without."""
    reason = f"an update of weights failed half way, with no sibling to restore from: {error!r}"
    for sibling in others:
        have = leaves_of(sibling)
        if have.lost():
            continue
        try:
            for path in paths:
                old = have[path]
                make = lambda spec, old=old: (place(old, spec.sharding, spec.dtype), False)  # noqa: E731
                _exchange(lead, path, make)
        except Exception as again:
            reason = f"an update of weights failed half way, and so did going back: {again}"
            continue
        return
    with suppress(EngineStopped):  # one that has left comes back with the weights of the pool
        lead.channel.run(lambda: give_up(lead, reason)).result()


def give_up(worker: EngineWorker, reason: str) -> None:
    """Leave an engine without weights, on its thread. What it has is of no version, or of an old
    one, and must not stay under an update of a part."""
    leaves = leaves_of(worker)
    leaves.drop(list(leaves))
    worker.unload(reason)


@contextmanager
def naming(worker: EngineWorker, path: str | None = None) -> Iterator[None]:
    """What fails in here fails as ours, with the device and the leaf, if it is about one."""
    try:
        yield
    except EnginePoolError:
        raise
    except Exception as error:
        devices = ", ".join(str(device) for device in worker.devices)
        raise WeightUpdateFailed(
            f"putting {path or 'new weights'} on engine {worker.index} ({devices}) failed: {error}",
            engine_index=worker.index,
            name=path,
        ) from error
