"""Brings a batch of leaves into the model's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from enginepool.weights.arrays import Array, jax_dtype, lies_in, same_buffer
from enginepool.weights.converters import Converter, cast, convert
from enginepool.weights.gathering import Devices, gathered, gathering_devices, shards_of
from enginepool.weights.placement import first_of, place, place_all
from enginepool.weights.shard_quantizing import ShardedMatrix, quantized_shards, sharded_matrix
from enginepool.weights.sources import Specs

if TYPE_CHECKING:
    from enginepool.weights.quantizer import Quantizer


@dataclass(frozen=True)
class Piece:
    """One leaf, and the arrays that it is made of.

    Attributes:
        path: The leaf's path.
        array: The whole leaf if the source has it in the model's layout, so that any engine may
            take its own shard of it; None if the tensors must be converted first.
        tensors: The tensors by name, in the order that the model wants.
        quantizer: Quantizes this leaf; None if the model does not quantize it.
    """

    path: str
    array: Array | None
    tensors: Mapping[str, Array]
    quantizer: Quantizer | None = None

    @property
    def leaves(self) -> tuple[str, ...]:
        """The paths of the model's leaves that this piece makes."""
        return (self.path,) if self.quantizer is None else self.quantizer.leaves


class Measured(NamedTuple):
    """The error of a quantized matrix, computed by the program that quantized it.

    Attributes:
        error: The norm of the error relative to the norm of the matrix, and the largest error.
        sums: The `part_sums` of the matrix before it was quantized.
    """

    error: Any
    sums: Any


def in_layout(
    batch: Sequence[Piece], engines: Sequence[Specs], mapping: Any, *, private: bool
) -> tuple[dict[str, Array], dict[str, Measured]]:
    """The leaves of a batch in the model's layout.

    If a leaf's tensors are sharded over the engines' devices, programs on all of these devices make
    it. Other leaves that need no conversion are the source's own arrays. One program on the first
    engine's first device makes the rest. A leaf that no single program can make is made step by
    step (`HuggingFaceMapping.convert`).

    Args:
        mapping: The first engine's `HuggingFaceMapping`.
        private: Whether nobody else has the source's NumPy arrays.

    Returns:
        The leaves, and the `Measured` of each quantized matrix by its path.
    """
    made: dict[str, Array] = {}
    measured: dict[str, Measured] = {}
    shardings: list[Any] = [specs[batch[0].leaves[0]].sharding for specs in engines]
    work: dict[Devices | None, list[_Job]] = {}
    for piece in batch:
        devices = gathering_devices(piece.tensors.values(), shardings)
        job = _job(piece, devices, engines[0], mapping, private)
        if isinstance(job, _Job):
            work.setdefault(job.devices, []).append(job)
        else:
            made[piece.path] = job
    for devices, jobs in work.items():
        if devices is not None:
            results = _gathered(jobs, devices)
        else:
            groups = [job.tensors for job in jobs]
            results = _converted([job.converter for job in jobs], groups, first_of(shardings[0]))
        for job, result in zip(jobs, results, strict=True):
            piece = job.piece
            if piece.quantizer is not None:
                *result, error, sums = result
                measured[piece.path] = Measured(error, sums)
            made |= zip(piece.leaves, result, strict=True)
    return made, measured


@dataclass(frozen=True)
class _Job:
    """What makes a piece's leaves.

    Attributes:
        devices: The devices that the tensors are sharded over; None if they are not.
        matrix: What is quantized before it is gathered; None if nothing is.
    """

    piece: Piece
    converter: Converter
    tensors: list[Any]
    devices: Devices | None
    matrix: ShardedMatrix | None = None


def _job(
    piece: Piece, devices: Devices | None, engine: Specs, mapping: Any, private: bool
) -> _Job | Array:
    """What makes a piece's leaves, or the leaf itself if no program is to make it."""
    tensors: list[Any] = list(piece.tensors.values())
    quantizer = piece.quantizer
    if devices is None and piece.array is not None and quantizer is None:
        return piece.array
    if piece.array is not None:
        spec = engine[piece.path] if quantizer is None else quantizer
        converter: Any = cast(spec.dtype)
    else:
        converter = mapping.converter(piece.path, piece.tensors)
    there: Any = engine[piece.leaves[0]].sharding
    if quantizer is None:
        if converter is None or (devices is None and len(there.device_set) > 1):
            return _in_steps(piece, mapping, private)
        return _Job(piece, converter, tensors, devices)
    turned = piece.array is None and mapping.turned(piece.path)
    if converter is None:
        tensors = [_in_steps(piece, mapping, private)]
        devices, converter, turned = None, cast(quantizer.dtype), False
    matrix = None
    if devices is not None:
        matrix = sharded_matrix(quantizer, converter, tensors, devices)
    converter = quantizer.after(converter, quantizer.turned_sharding(there), transposes=turned)
    return _Job(piece, converter, tensors, devices, matrix)


def quantized_in_turn(path: str, tensors: Mapping[str, Any], mapping: Any) -> int:
    """How many parts a matrix has that are cast and quantized one after the other: the experts of a
    stack. Else 1.

    Args:
        tensors: The specs of its tensors.
    """
    converter = mapping.converter(path, tensors) if len(tensors) > 1 else None
    return len(tensors) if converter is not None and converter.stacks is not None else 1


def _gathered(jobs: Sequence[_Job], devices: Devices) -> list[tuple[jax.Array, ...]]:
    """The leaves of jobs whose tensors are sharded over these devices."""
    converters: list[Converter] = [job.converter for job in jobs]
    groups = [[shards_of(tensor, devices) for tensor in job.tensors] for job in jobs]
    early = {i: job.matrix for i, job in enumerate(jobs) if job.matrix is not None}
    made = quantized_shards([*early.values()], [groups[i][0] for i in early], devices)
    for i, (converter, shards) in zip(early, made, strict=True):
        converters[i], groups[i] = converter, shards
    return gathered(converters, groups, devices)


def _converted(
    converters: Sequence[Converter], groups: Sequence[Sequence[Array]], device: Sharding
) -> list[tuple[jax.Array, ...]]:
    flat = [tensor for group in groups for tensor in group]
    dtypes = [jax_dtype(tensor.dtype) for tensor in flat]
    # No copy of NumPy arrays is needed, hence `private`: the program makes new arrays, and the
    # update waits for it before the caller can change the old ones.
    placed = iter(place_all(flat, [device] * len(flat), dtypes, private=True))
    tensors = [[next(placed) for _ in group] for group in groups]
    return convert(converters, tensors, [device] * len(converters))


def _in_steps(piece: Piece, mapping: Any, private: bool) -> jax.Array:
    def put(name: str, sharding: Sharding) -> jax.Array:
        tensor = piece.tensors[name]
        return place(tensor, sharding, jax_dtype(tensor.dtype), private=True)

    made = mapping.convert(piece.path, piece.tensors, put)
    # A step may return a tensor unchanged. Its memory is then still the owner's.
    theirs = piece.tensors.values()
    host = [x for x in theirs if isinstance(x, np.ndarray) and not private]
    if any(lies_in(made, x) for x in host) or any(same_buffer(made, x) for x in theirs):
        made = jax.device_put(jnp.array(made, copy=True), made.sharding)
    return made
