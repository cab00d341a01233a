"""An array in another sharding, made of its parts: cut where they lie, copied straight to the
device that wants them, and joined there.

No program here is of several devices. Engines of several chips serve meanwhile, and a trainer may
compute on a thread of its own: two programs whose devices wait for one another, started by two
threads at once, may wait for ever. On no device is there more than what it gets twice.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

# Start, stop and step along each axis; the step is 1.
Box = tuple[tuple[int, int, int], ...]
Holders = Mapping[Box, Mapping[jax.Device, jax.Array]]


def bounds(index: Any, shape: tuple[int, ...]) -> Box:
    """A shard's index as a box, however JAX wrote it down."""
    return tuple(part.indices(size) for part, size in zip(index or (), shape, strict=True))


def holders(array: jax.Array) -> Holders:
    """Which device has which part."""
    found: dict[Box, dict[jax.Device, jax.Array]] = {}
    for shard in array.addressable_shards:
        found.setdefault(bounds(shard.index, array.shape), {})[shard.device] = shard.data
    return found


def wanted(shape: tuple[int, ...], sharding: Sharding) -> dict[jax.Device, Box]:
    """What each device is to have."""
    places = sharding.addressable_devices_indices_map(shape)
    return {device: bounds(index, shape) for device, index in places.items()}


def nearest(having: Mapping[jax.Device, jax.Array], device: jax.Device) -> jax.Array:
    """A part as this device has it; or else as one of the others does, not always the same."""
    return having[device] if device in having else [*having.values()][device.id % len(having)]


def resharded(array: jax.Array, sharding: Sharding, dtype: Any) -> jax.Array:
    """The array in this sharding and dtype. Waits for the devices: the parts are free again
    before the next array comes."""
    have = holders(array)
    kind = sharding.memory_kind
    made = [
        _part(have, box, SingleDeviceSharding(device, memory_kind=kind), np.dtype(dtype))
        for device, box in wanted(array.shape, sharding).items()
    ]
    whole = jax.make_array_from_single_device_arrays(array.shape, sharding, made)
    return whole.block_until_ready()


def _part(have: Holders, box: Box, there: SingleDeviceSharding, dtype: np.dtype) -> jax.Array:
    (device,) = there.device_set
    pieces, places = [], []
    for theirs, having in have.items():
        both = [(max(a, c), min(b, d)) for (a, b, _), (c, d, _) in zip(theirs, box, strict=True)]
        if any(start >= stop for start, stop in both):
            continue
        part = nearest(having, device)
        if part.sharding.memory_kind != there.memory_kind:  # a trainer's, put aside on the host
            own = SingleDeviceSharding(*part.devices(), memory_kind=there.memory_kind)
            part = jax.device_put(part, own)
        # What gets narrower does so before it moves.
        becomes = dtype if dtype.itemsize < part.dtype.itemsize else part.dtype
        cut = tuple((b - a, c - a) for (a, _, _), (b, c) in zip(theirs, both, strict=True))
        if part.dtype != becomes or cut != tuple((0, size) for size in part.shape):
            part = _cut(part, cut, becomes)
        pieces.append(part)
        places.append(tuple(b - a for (a, _, _), (b, _) in zip(box, both, strict=True)))
    pieces = jax.device_put(pieces, there)
    shape = tuple(stop - start for start, stop, _ in box)
    if len(pieces) == 1 and pieces[0].dtype == dtype:
        return pieces[0]
    return _join(pieces, tuple(places), shape, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cut(part: jax.Array, box: tuple[tuple[int, int], ...], dtype: np.dtype) -> jax.Array:
    return jax.lax.slice(part, *zip(*box, strict=True)).astype(dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _join(
    pieces: list[jax.Array], places: Any, shape: tuple[int, ...], dtype: np.dtype
) -> jax.Array:
    # One after the other into the same memory: a concatenation along two axes would need more.
    whole = jnp.zeros(shape, dtype)
    for piece, place in zip(pieces, places, strict=True):
        whole = jax.lax.dynamic_update_slice(whole, piece.astype(dtype), place)
    return whole
