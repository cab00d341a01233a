"""Puts a plan's leaves on engines' devices, beside the leaves that the engines use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import jax

from enginepool.engine.jobs import EngineStopped
from enginepool.engine.worker import EngineWorker
from enginepool.errors import EnginePoolError, WeightUpdateFailed
from enginepool.weights.placement import free_bytes, lies_there, place
from enginepool.weights.plan import Piece, Plan


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


def stage(plan: Plan, workers: Sequence[EngineWorker], copy: bool) -> dict[int, Staged]:
    """Put every new leaf on every engine's device. The engines do not use them yet.

    Raises:
        WeightUpdateFailed: Placing a leaf failed; the error names the engine and the leaf.
        InvalidWeights: A streamed source is wrong.
    """
    staged = {worker.index: Staged() for worker in workers}
    for piece in plan.pieces():
        for worker, array, shared in _everywhere(plan, piece, workers, copy):
            mine = staged[worker.index]
            mine.arrays[piece.path] = array
            if shared:
                mine.shared.add(piece.path)
        del piece  # else it is kept while the next tensor is read
    for worker in workers:
        for path, array in staged[worker.index].arrays.items():
            with naming(worker, path):
                array.block_until_ready()
    return staged


def _everywhere(
    plan: Plan, piece: Piece, workers: Sequence[EngineWorker], copy: bool
) -> Iterator[tuple[EngineWorker, jax.Array, bool]]:
    first = None
    specs = [worker.leaves.specs[piece.path] for worker in workers]
    for worker in workers:
        spec = worker.leaves.specs[piece.path]
        assert spec.sharding is not None
        with naming(worker, piece.path):
            if first is None:
                piece = plan.whole(piece, specs)
            if first is None or lies_there(piece.array, spec.sharding):
                array, shared = plan.make(piece, spec, copy=copy)
            else:
                array, shared = place(first, spec.sharding, spec.dtype), False
        if first is None:
            first = array
        yield worker, array, shared


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
