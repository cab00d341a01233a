"""Reshards arrays part by part. Parts are cut on the devices that have them, copied straight to the
devices that want them, and joined there.

Each program here runs on one device. Engines of several chips serve meanwhile, and a trainer may
compute in another thread. If two threads start programs over several devices at once, these may
wait for each other for ever. The peak memory on a device is twice what the device receives.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

# Start, stop and step along each axis; the step is 1.
Box = tuple[tuple[int, int, int], ...]


def bounds(index: Any, shape: tuple[int, ...]) -> Box:
    """A shard's index as a box, the same for every form in which JAX may write it."""
    return tuple(part.indices(size) for part, size in zip(index or (), shape, strict=True))


def boxes(shape: tuple[int, ...], sharding: Sharding) -> dict[jax.Device, Box]:
    """The box of the array that each device has, or will get."""
    places = sharding.addressable_devices_indices_map(shape)
    return {device: bounds(index, shape) for device, index in places.items()}


@dataclass
class _Part:
    """The part of an array that one device gets.

    Attributes:
        there: The device.
        pieces: The arrays that make the part. They are cut, then moved to the device.
        places: Where in the part each piece begins.
    """

    there: SingleDeviceSharding
    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: list[jax.Array] = field(default_factory=list)
    places: list[tuple[int, ...]] = field(default_factory=list)
    cuts: list[Any] = field(default_factory=list)  # the box that is cut out of each piece


def resharded(
    arrays: Sequence[jax.Array], shardings: Sequence[Sharding], dtypes: Sequence[Any]
) -> list[jax.Array]:
    """The arrays in these shardings and dtypes. Waits for the devices, so that the parts' memory is
    free before the next arrays come."""
    parts: list[list[_Part]] = []
    for array, sharding, dtype in zip(arrays, shardings, dtypes, strict=True):
        parts.append(_parts(array, sharding, np.dtype(dtype)))
    flat = [part for each in parts for part in each]
    _cut_pieces(flat)
    _move_pieces(flat)
    joined = iter(_joined(flat))
    return jax.block_until_ready(
        [
            jax.make_array_from_single_device_arrays(
                array.shape, sharding, [next(joined) for _ in each]
            )
            for array, sharding, each in zip(arrays, shardings, parts, strict=True)
        ]
    )


def _parts(array: jax.Array, sharding: Sharding, dtype: np.dtype) -> list[_Part]:
    have: dict[Box, dict[jax.Device, jax.Array]] = {}
    for shard in array.addressable_shards:
        have.setdefault(bounds(shard.index, array.shape), {})[shard.device] = shard.data
    parts = []
    for device, box in boxes(array.shape, sharding).items():
        there = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        part = _Part(there, tuple(stop - start for start, stop, _ in box), dtype)
        for theirs, holders in have.items():
            both = [
                (max(a, c), min(b, d)) for (a, b, _), (c, d, _) in zip(theirs, box, strict=True)
            ]
            if any(start >= stop for start, stop in both):
                continue
            part.pieces.append(_nearest(holders, device))
            part.places.append(tuple(b - a for (a, _, _), (b, _) in zip(box, both, strict=True)))
            part.cuts.append(
                tuple((b - a, c - a) for (a, _, _), (b, c) in zip(theirs, both, strict=True))
            )
        parts.append(part)
    return parts


def _nearest(holders: Mapping[jax.Device, jax.Array], device: jax.Device) -> jax.Array:
    """This device's own copy, or else another device's. The load is spread over those that have
    one."""
    return holders[device] if device in holders else [*holders.values()][device.id % len(holders)]


def _cut_pieces(parts: Sequence[_Part]) -> None:
    """Cut each piece to the box that is wanted, by one program per device."""
    offloaded = [  # by a trainer, to the host
        (part, index)
        for part in parts
        for index, piece in enumerate(part.pieces)
        if piece.sharding.memory_kind != part.there.memory_kind
    ]
    own = [
        SingleDeviceSharding(*part.pieces[i].devices(), memory_kind=part.there.memory_kind)
        for part, i in offloaded
    ]
    for (part, i), piece in zip(
        offloaded, jax.device_put([part.pieces[i] for part, i in offloaded], own), strict=True
    ):
        part.pieces[i] = piece
    by_device: dict[jax.Device, list[tuple[_Part, int, Any]]] = {}
    for part in parts:
        for index, (piece, cut) in enumerate(zip(part.pieces, part.cuts, strict=True)):
            # A piece that gets a narrower dtype is cast before it moves.
            narrower = part.dtype.itemsize < piece.dtype.itemsize
            becomes = part.dtype if narrower else piece.dtype
            if piece.dtype != becomes or cut != tuple((0, size) for size in piece.shape):
                (device,) = piece.devices()
                by_device.setdefault(device, []).append((part, index, (cut, becomes)))
    for wanted in by_device.values():
        pieces = [part.pieces[index] for part, index, _ in wanted]
        for (part, index, _), piece in zip(
            wanted, _cut(pieces, tuple(cut for *_, cut in wanted)), strict=True
        ):
            part.pieces[index] = piece


def _move_pieces(parts: Sequence[_Part]) -> None:
    there = [part.there for part in parts for _ in part.pieces]
    moved = iter(jax.device_put([piece for part in parts for piece in part.pieces], there))
    for part in parts:
        part.pieces = [next(moved) for _ in part.pieces]


def _joined(parts: Sequence[_Part]) -> list[jax.Array]:
    """Join the pieces of each part to one array, by one program per device."""
    made: list[Any] = [None] * len(parts)
    by_device: dict[Any, list[int]] = {}
    for index, part in enumerate(parts):
        if len(part.pieces) == 1 and part.pieces[0].dtype == part.dtype:
            made[index] = part.pieces[0]
        else:
            by_device.setdefault(part.there, []).append(index)
    for indices in by_device.values():
        mine = [parts[index] for index in indices]
        how = tuple((tuple(part.places), part.shape, part.dtype) for part in mine)
        for index, whole in zip(indices, _join([part.pieces for part in mine], how), strict=True):
            made[index] = whole
    for part in parts:
        part.pieces = []  # no reference stays, so that their memory can be freed
    return made


@functools.partial(jax.jit, static_argnums=1)
def _cut(pieces: list[jax.Array], cuts: Any) -> list[jax.Array]:
    return [
        jax.lax.slice(piece, *zip(*box, strict=True)).astype(dtype)
        for piece, (box, dtype) in zip(pieces, cuts, strict=True)
    ]


@functools.partial(jax.jit, static_argnums=1)
def _join(parts: list[list[jax.Array]], how: Any) -> list[jax.Array]:
    wholes = []
    for pieces, (places, shape, dtype) in zip(parts, how, strict=True):
        # Pieces are written into the same memory in turn. Concatenating along two axes needs more.
        whole = jnp.zeros(shape, dtype)
        for piece, place in zip(pieces, places, strict=True):
            whole = jax.lax.dynamic_update_slice(whole, piece.astype(dtype), place)
        wholes.append(whole)
    return wholes
