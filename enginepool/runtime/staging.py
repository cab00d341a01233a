"""Puts a plan's leaves on engines' devices, beside the leaves that the engines use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import jax

from enginepool.engine.jobs import EngineStopped
from enginepool.engine.worker import EngineWorker
from enginepool.errors import EnginePoolError, InvalidWeights, WeightUpdateFailed
from enginepool.weights.arrays import Array
from enginepool.weights.conversion import Piece
from enginepool.weights.placement import free_bytes, lies_there, moves
from enginepool.weights.plan import Plan


@dataclass
class Staged:
    """New leaves of one engine, on its device.

    Attributes:
        shared: The paths whose arrays are the source's own buffers.
    """

    arrays: dict[str, jax.Array] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)


def choose_staging(plan: Plan, workers: Sequence[EngineWorker], copy: bool) -> str:
    """ "double" where a second set fits on every device, else "stream"."""
    for worker in workers:
        arriving = plan.arriving(worker.leaves.specs, copied=copy)
        for device in worker.devices:
            free = free_bytes(device)
            if free is not None and arriving > free:
                return "stream"
    return "double"


def check_complete(workers: Sequence[EngineWorker], plan: Plan) -> None:
    """
    Raises:
        InvalidWeights: An engine has lost weights that the source does not have.
    """
    for worker in [w for w in workers if w.condition.reachable]:
        if lost := set(worker.leaves.lost()).difference(plan.paths):
            raise InvalidWeights(
                f"{len(lost)} weights are neither on engine {worker.index} nor in the source; "
                "update all weights",
                names=sorted(lost),
            )


def stage(plan: Plan, workers: Sequence[EngineWorker], copy: bool) -> dict[int, Staged]:
    """Put every new leaf on every engine's device. The engines do not use them yet.

    Raises:
        WeightUpdateFailed: Placing a leaf failed; the error names the engine and the leaf.
        InvalidWeights: A streamed source is wrong.
    """
    staged = {worker.index: Staged() for worker in workers}
    running: deque[list[dict[str, jax.Array]]] = deque()
    for batch in plan.batches(by_leaf=False):
        # At most one batch takes memory beside the new set. A batch that is only copied takes none,
        # so it begins while the batch before it still runs. More than two batches at a time would
        # delay the engines' steps on CPU.
        while len(running) > plan.only_moves(batch):
            wait(workers, running.popleft())
        made = put(plan, batch, workers, copy)
        for worker, arrays, shared in made:
            staged[worker.index].arrays |= arrays
            staged[worker.index].shared |= shared
        running.append([arrays for _, arrays, _ in made])
        del batch  # else it is kept while the next tensors are read
    while running:
        wait(workers, running.popleft())
    return staged


def put(
    plan: Plan, batch: Sequence[Piece], workers: Sequence[EngineWorker], copy: bool
) -> list[tuple[EngineWorker, dict[str, jax.Array], set[str]]]:
    """Put a batch on every engine's device.

    Returns:
        The leaves of each engine, and which of them are the source's own buffers.
    """
    try:
        return _put(plan, batch, workers, copy)
    except WeightUpdateFailed:
        if len(batch) == 1:
            raise
    # Try the leaves one by one, to find the one that fails. If none fails, use the result.
    parts = [_put(plan, [piece], workers, copy) for piece in batch]
    return [
        (
            worker,
            {path: array for part in parts for path, array in part[index][1].items()},
            {path for part in parts for path in part[index][2]},
        )
        for index, worker in enumerate(workers)
    ]


def _put(
    plan: Plan, batch: Sequence[Piece], workers: Sequence[EngineWorker], copy: bool
) -> list[tuple[EngineWorker, dict[str, jax.Array], set[str]]]:
    lead = workers[0]
    name = batch[0].path if len(batch) == 1 else None
    with naming(lead, name):
        ready = plan.ready(batch, [worker.leaves.specs for worker in workers])
    made = []
    arrays: dict[str, Array] = ready
    for worker in workers:
        specs = worker.leaves.specs
        with naming(worker, name):
            if worker is not lead:  # copy the first engine's arrays, except as `_from_source` says
                first = made[0][1]
                arrays = {
                    path: array if _from_source(array, specs[path]) else first[path]
                    for path, array in ready.items()
                }
            made.append((worker, *plan.put(batch, arrays, specs, copy=copy)))
    return made


def _from_source(array: Array, spec: Any) -> bool:
    """Whether an engine takes a leaf from the source and not from the first engine."""
    return moves(array, spec) or lies_there(array, spec.sharding)


def wait(workers: Sequence[EngineWorker], made: Sequence[Mapping[str, jax.Array]]) -> None:
    """Wait until these leaves of each engine are there.

    Raises:
        WeightUpdateFailed: One is not; the error names the engine and the leaf.
    """
    for worker, arrays in zip(workers, made, strict=False):
        with suppress(Exception):
            jax.block_until_ready(list(arrays.values()))
            continue
        for path, array in arrays.items():
            with naming(worker, path):
                array.block_until_ready()


@contextmanager
def naming(worker: EngineWorker, path: str | None = None) -> Iterator[None]:
    """Turn an error inside the block into `WeightUpdateFailed`, with the engine and the leaf."""
    try:
        yield
    except (EnginePoolError, EngineStopped):
        raise
    except Exception as error:
        devices = ", ".join(str(device) for device in worker.devices)
        raise WeightUpdateFailed(
            f"putting {path or 'new weights'} on engine {worker.index} ({devices}) failed: {error}",
            engine_index=worker.index,
            name=path,
        ) from error
