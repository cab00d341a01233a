"""Brings a batch of leaves into the model's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from enginepool.weights.arrays import Array, jax_dtype, lies_in, same_buffer
from enginepool.weights.converters import Converter, cast, convert
from enginepool.weights.placement import gathered, gathering_devices, on, place, place_all
from enginepool.weights.sources import Specs


@dataclass(frozen=True)
class Piece:
    """One leaf, and the arrays that it is made of.

    Attributes:
        path: The leaf's path.
        array: The whole leaf if the source has it in the model's layout, so that any engine may
            take its own shard of it; None if the tensors must be converted first.
        tensors: The tensors by name, in the order that the model wants.
    """

    path: str
    array: Array | None
    tensors: Mapping[str, Array]


def in_layout(
    batch: Sequence[Piece], engines: Sequence[Specs], mapping: Any, *, private: bool
) -> dict[str, Array]:
    """The leaves of a batch in the model's layout. A leaf that needs no conversion is the source's
    own array. One program makes the others. It runs on the first engine's device, or, if the
    source is sharded over the engines' devices, on all of them.

    Args:
        mapping: The first engine's `HuggingFaceMapping`.
        private: Whether nobody else has the source's NumPy arrays.
    """
    made: dict[str, Array] = {}
    work: dict[Any, list[tuple[str, Converter, list[Array]]]] = {}
    shardings: list[Any] = [specs[batch[0].path].sharding for specs in engines]
    for piece in batch:
        spec, tensors = engines[0][piece.path], list(piece.tensors.values())
        devices = gathering_devices(tensors, shardings)
        if devices is None and piece.array is not None:
            made[piece.path] = piece.array
            continue
        if piece.array is not None:
            converter: Any = cast(spec.dtype)
        else:
            converter = mapping.converter(piece.path, piece.tensors)
        if converter is None or (devices is None and len(shardings[0].device_set) > 1):
            made[piece.path] = _converted_in_steps(piece, mapping, private)
        else:
            work.setdefault(devices, []).append((piece.path, converter, tensors))
    for devices, jobs in work.items():
        paths, converters, groups = zip(*jobs, strict=True)
        if devices is not None:
            leaves = gathered(converters, groups, devices)
        else:
            leaves = _converted(converters, groups, [engines[0][path] for path in paths])
        made |= zip(paths, leaves, strict=True)
    return made


def _converted(
    converters: Sequence[Converter],
    groups: Sequence[Sequence[Array]],
    specs: Sequence[jax.ShapeDtypeStruct],
) -> list[jax.Array]:
    shardings: list[Any] = [spec.sharding for spec in specs]
    (device,) = shardings[0].device_set
    flat = [tensor for group in groups for tensor in group]
    dtypes = [jax_dtype(tensor.dtype) for tensor in flat]
    # No copy is needed: the program makes new arrays, and ends before the caller can change its
    # own.
    there = [on(device, shardings[0].memory_kind)] * len(flat)
    placed = iter(place_all(flat, there, dtypes, private=True))
    return convert(converters, [[next(placed) for _ in group] for group in groups], shardings)


def _converted_in_steps(piece: Piece, mapping: Any, private: bool) -> jax.Array:
    def put(name: str, sharding: Sharding) -> jax.Array:
        tensor = piece.tensors[name]
        return place(tensor, sharding, jax_dtype(tensor.dtype), private=True)

    made = mapping.convert(piece.path, piece.tensors, put)
    # A step may return a tensor unchanged, which still is its owner's memory.
    theirs = piece.tensors.values()
    host = [x for x in theirs if isinstance(x, np.ndarray) and not private]
    if any(lies_in(made, x) for x in host) or any(same_buffer(made, x) for x in theirs):
        made = jax.device_put(jnp.array(made, copy=True), made.sharding)
    return made
