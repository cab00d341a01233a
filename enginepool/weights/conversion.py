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
from enginepool.weights.gathering import gathered, gathering_devices
from enginepool.weights.placement import first_of, place, place_all
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
    """The leaves of a batch in the model's layout. A leaf that needs no conversion is the source's
    own array. One program makes the others. It runs on the first engine's first device, or, if the
    source is sharded over the engines' devices, on all of them.

    Args:
        mapping: The first engine's `HuggingFaceMapping`.
        private: Whether nobody else has the source's NumPy arrays.

    Returns:
        The leaves, and the `Measured` of each quantized matrix by its path.
    """
    made: dict[str, Array] = {}
    measured: dict[str, Measured] = {}
    work: dict[Any, list[tuple[Piece, Converter, list[Array]]]] = {}
    shardings: list[Any] = [specs[batch[0].leaves[0]].sharding for specs in engines]
    for piece in batch:
        tensors: list[Array] = list(piece.tensors.values())
        quantizer = piece.quantizer
        devices = gathering_devices(tensors, shardings)
        if devices is None and piece.array is not None and quantizer is None:
            made[piece.path] = piece.array
            continue
        if piece.array is not None:
            spec = engines[0][piece.path] if quantizer is None else quantizer
            converter: Any = cast(spec.dtype)
        else:
            converter = mapping.converter(piece.path, piece.tensors)
        turned = piece.array is None and mapping.turned(piece.path)
        if quantizer is not None:
            if converter is None:
                tensors = [_in_steps(piece, mapping, private)]
                devices, converter, turned = None, cast(quantizer.dtype), False
            there: Any = engines[0][piece.leaves[0]].sharding
            converter = quantizer.after(converter, quantizer.turned_sharding(there), turned=turned)
        elif converter is None or (devices is None and len(shardings[0].device_set) > 1):
            made[piece.path] = _in_steps(piece, mapping, private)
            continue
        work.setdefault(devices, []).append((piece, converter, tensors))
    for devices, jobs in work.items():
        pieces, converters, groups = zip(*jobs, strict=True)
        if devices is not None:
            results = gathered(converters, groups, devices)
        else:
            results = _converted(converters, groups, first_of(shardings[0]))
        for piece, result in zip(pieces, results, strict=True):
            if piece.quantizer is not None:
                *result, error, sums = result
                measured[piece.path] = Measured(error, sums)
            made |= zip(piece.leaves, result, strict=True)
    return made, measured


def _converted(
    converters: Sequence[Converter], groups: Sequence[Sequence[Array]], device: Sharding
) -> list[tuple[jax.Array, ...]]:
    flat = [tensor for group in groups for tensor in group]
    dtypes = [jax_dtype(tensor.dtype) for tensor in flat]
    # `private` because no copy is needed: the program makes new arrays, and it ends before the
    # caller can change the source's.
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
