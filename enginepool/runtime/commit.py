"""Puts new weights in place: staged sets on all engines or on none, or batch by batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import jax

from enginepool.engine.jobs import EngineStopped
from enginepool.engine.worker import EngineWorker
from enginepool.errors import WeightUpdateFailed
from enginepool.logs import logger
from enginepool.runtime.quiesce import EngineGroup
from enginepool.runtime.staging import Staged, check_complete, naming, put, wait
from enginepool.weights.conversion import Piece
from enginepool.weights.plan import Plan

# An engine's leaves before they were replaced, and which of them were shared.
Before = tuple[dict[str, jax.Array], set[str]]


def commit(engines: EngineGroup, staged: dict[int, Staged]) -> dict[int, Before]:
    """Put what was staged in place on every engine or, if one fails, on none.

    Returns:
        The leaves that each engine had before, by its index. Freeing them takes time, so the caller
        should keep them until the engines go on.
    """
    before: dict[int, Before] = {}

    def put_new(worker: EngineWorker) -> None:
        new, shared = staged[worker.index], worker.leaves.shared.copy()
        with naming(worker):
            before[worker.index] = worker.replace_weights(new.arrays, new.shared), shared

    def put_back(worker: EngineWorker) -> None:
        worker.restore_weights(*before.get(worker.index, ({}, ())))

    try:
        engines.run(put_new)
    except BaseException:  # Control-C too: restore the leaves that were replaced so far
        engines.run(put_back)
        raise
    return before


def stream(
    plan: Plan, engines: EngineGroup, copy: bool, siblings: Sequence[EngineWorker] = ()
) -> tuple[dict[int, Staged], dict[int, str]]:
    """Replace the leaves of stopped engines, a batch at a time. No device ever holds more than one
    weight set and the largest leaf.

    The first engine gets them from the source. The others copy the first one's, except leaves of
    the source that lie on their own devices. If the first engine's set fails half way, its old
    weights are put back from a sibling. If another engine's set fails, that engine is left without
    weights.

    Args:
        siblings: Engines that serve with the old weights meanwhile.

    Returns:
        The leaves that each engine got, and for each engine that got none the reason.
    """
    lead, *others = engines.workers
    staged = {worker.index: Staged() for worker in engines.workers}
    usable = not lead.leaves.lost()
    touched: list[str] = []
    try:
        for batch in plan.batches(by_leaf=True):
            touched += [leaf for piece in batch for leaf in piece.leaves]
            staged[lead.index].shared |= _replace(lead, plan, batch, copy)
            del batch
        check_complete(engines.workers, plan)  # what an iterator has is known only now
    except BaseException as error:
        if usable and touched:  # else the engine has what it had
            _restore(lead, [*others, *siblings], plan, touched, error)
        raise
    failed = {}
    for place, worker in enumerate(others):
        try:
            again = plan.again(lead.leaves, worker.leaves.specs)
            for batch in again.batches(by_leaf=True):
                staged[worker.index].shared |= _replace(worker, again, batch, copy)
        except Exception as error:
            failed[worker.index] = f"it missed an update of weights: {error}"
            logger().warning(
                "enginepool.weights_not_updated", engine=worker.index, error=str(error)
            )
        except BaseException as error:  # Control-C: the engines after this one have the old weights
            for changed in (lead, *others[: place + 1]):
                _restore(changed, [*others[place + 1 :], *siblings], plan, plan.paths, error)
            raise
    for worker in engines.workers:
        staged[worker.index].arrays = {p: worker.leaves[p] for p in plan.paths}
    return staged, failed


def _replace(worker: EngineWorker, plan: Plan, batch: Sequence[Piece], copy: bool) -> set[str]:
    """Drop the leaves of a batch, then put the new ones in place; both as jobs of the engine.

    Returns:
        The paths whose arrays are the source's own buffers.
    """
    leaves = worker.leaves
    _run(worker, {leaf: leaves.specs[leaf] for piece in batch for leaf in piece.leaves}, ())
    ((_, arrays, shared),) = put(plan, batch, [worker], copy)
    wait([worker], [arrays])
    _run(worker, arrays, shared)
    return shared


def _run(worker: EngineWorker, leaves: Mapping[str, Any], shared: Collection[str]) -> None:
    """Put leaves in place as a job of the engine; one by one if that fails, to name the leaf."""

    def run(some: Mapping[str, Any], name: str | None) -> None:
        job = partial(worker.leaves.replace, some, set(shared).intersection(some))
        with naming(worker, name):
            worker.channel.run(lambda: job() and None).result()  # does not keep the old leaves

    if len(leaves) > 1:
        with suppress(WeightUpdateFailed):
            run(leaves, None)
            return
    for path, leaf in leaves.items():
        run({path: leaf}, path)


def _restore(
    worker: EngineWorker,
    siblings: Sequence[EngineWorker],
    plan: Plan,
    paths: Sequence[str],
    error: BaseException,
) -> None:
    """Give an engine its old weights back. If that fails, it is left without weights."""
    reason = f"an update of weights failed half way, with no sibling to restore from: {error!r}"
    for sibling in siblings:
        have = sibling.leaves
        if not sibling.condition.serving or have.lost():
            continue
        try:
            back = plan.copying({path: have[path] for path in paths})
            for batch in back.batches(by_leaf=True):
                _replace(worker, back, batch, copy=False)
        except Exception as again:
            reason = f"an update of weights failed half way; restoring the old ones failed: {again}"
            continue
        return
    with suppress(EngineStopped):  # a failed engine comes back with the weights of the pool
        worker.channel.run(lambda: leave_without_weights(worker, reason)).result()


def leave_without_weights(worker: EngineWorker, reason: str) -> None:
    """Drop all of an engine's weights, on its thread. They belong to no version or to an old one,
    and a later partial update must not be combined with them."""
    leaves = worker.leaves
    leaves.drop(list(leaves))
    worker.unload(reason)
