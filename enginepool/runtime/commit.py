"""Puts new weights in place: staged sets on all engines or on none, or leaf by leaf."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress

import jax

from enginepool.engine.jobs import EngineStopped
from enginepool.engine.worker import EngineWorker
from enginepool.logs import logger
from enginepool.runtime.quiesce import StoppedEngines
from enginepool.runtime.staging import Staged, naming
from enginepool.weights.placement import place
from enginepool.weights.plan import Plan

# An engine's leaves before they were replaced, and which of them were shared.
Before = tuple[dict[str, jax.Array], set[str]]


def commit(engines: StoppedEngines, staged: dict[int, Staged]) -> dict[int, Before]:
    """Put what was staged in place on every engine or, if one fails, on none.

    Returns:
        What each engine had before, by its index. Freeing that takes time, so it should wait until
        the engines go on.
    """
    before: dict[int, Before] = {}

    def put(worker: EngineWorker) -> None:
        new, shared = staged[worker.index], worker.leaves.shared.copy()
        with naming(worker):
            before[worker.index] = worker.replace_weights(new.arrays, new.shared), shared

    def put_back(worker: EngineWorker) -> None:
        worker.restore_weights(*before.get(worker.index, ({}, ())))

    try:
        engines.run(put)
    except BaseException:  # Control-C too: what was put in place so far goes back
        engines.run(put_back)
        raise
    return before


def stream(
    plan: Plan, engines: StoppedEngines, copy: bool
) -> tuple[dict[int, Staged], dict[int, str]]:
    """Replace the leaves of stopped engines one by one: there is never more than a set and a leaf.

    The first engine gets them from the source. The others copy the first one's, except leaves of
    the source that lie on their own devices. If the first engine's set fails half way, its old
    weights are put back from a sibling. If another engine's set fails, that engine is left without
    weights.

    Returns:
        What each engine got, and for each engine that got nothing the reason.
    """
    lead, *others = engines.workers
    counts = {worker.index: Staged() for worker in engines.workers}
    usable = not lead.leaves.lost()
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
            again = plan.again(lead.leaves, worker.leaves.specs)
            for piece in again.pieces():
                make = functools.partial(again.make, piece, copy=copy)
                if _exchange(worker, piece.path, make):
                    counts[worker.index].shared.add(piece.path)
        except Exception as error:
            failed[worker.index] = f"it missed an update of weights: {error}"
            logger().warning(
                "enginepool.weights_not_updated", engine=worker.index, error=str(error)
            )
    for worker in engines.workers:
        counts[worker.index].arrays = {p: worker.leaves[p] for p in plan.paths}
    return counts, failed


def _exchange(
    worker: EngineWorker, path: str, make: Callable[[jax.ShapeDtypeStruct], tuple[jax.Array, bool]]
) -> bool:
    """Drop one leaf, then put the new one in place; both as jobs of the engine."""
    leaves = worker.leaves
    with naming(worker, path):
        worker.channel.run(lambda: leaves.drop([path]) and None).result()
        array, shared = make(leaves.specs[path])
        array.block_until_ready()
        mine = [path] if shared else []
        worker.channel.run(lambda: leaves.replace({path: array}, mine) and None).result()
    return shared


def _restore(
    lead: EngineWorker, others: Sequence[EngineWorker], paths: Sequence[str], error: BaseException
) -> None:
    """Give the first engine its old weights back. If that fails too, it is left without weights."""
    reason = f"an update of weights failed half way, with no sibling to restore from: {error!r}"
    for sibling in others:
        have = sibling.leaves
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
        lead.channel.run(lambda: leave_without_weights(lead, reason)).result()


def leave_without_weights(worker: EngineWorker, reason: str) -> None:
    """Drop all of an engine's weights, on its thread. They are of no version, or of an old one:
    a later update of a part must not add to them."""
    leaves = worker.leaves
    leaves.drop(list(leaves))
    worker.unload(reason)
