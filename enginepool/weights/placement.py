"""Putting an array where an engine wants it, without a copy wherever the bytes lie there already.

The rules of `jax.device_put` that this rests on were measured (JAX 0.8.1 and 0.10.2): between two
descriptions of one device it keeps the buffer, a replicated or sharded array is gathered, and on
the CPU platform it reads a NumPy array in place, so that one who writes to it changes weights.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from enginepool.weights.arrays import Array


def place(
    array: Array, sharding: Sharding, dtype: Any, *, copy: bool = False, private: bool = False
) -> jax.Array:
    """The array with this sharding and dtype.

    A JAX array whose shards lie where `sharding` wants them is used as it is: same buffers, so
    its owner's `delete` or donation takes them away. `copy=True` prevents that. A NumPy array is
    copied, unless `private` says that nobody else has it.
    """
    if isinstance(array, np.ndarray):
        on_host = any(device.platform == "cpu" for device in sharding.device_set)
        if on_host and not private and array.dtype == dtype:
            array = np.array(array)
        placed = jax.device_put(array, sharding)
    else:
        placed = _own_shards(array, sharding)
        if placed is None:
            placed = jax.device_put(array, sharding)
        if copy and placed.dtype == dtype:
            # `device_put(may_alias=False)` shares a replicated array's shard all the same.
            placed = jax.device_put(jnp.array(placed, copy=True), sharding)
    if placed.dtype == dtype:
        return placed
    return jax.device_put(placed.astype(dtype), sharding)


def lies_there(array: Any, sharding: Sharding, dtype: Any) -> bool:
    """Whether `place` would use the array's own buffers."""
    return (
        isinstance(array, jax.Array)
        and array.dtype == dtype
        and _own_shards(array, sharding) is not None
    )


def _own_shards(array: jax.Array, sharding: Sharding) -> jax.Array | None:
    """The array made of the shards that lie on the right devices, if all do."""
    wanted = sharding.addressable_devices_indices_map(array.shape)
    if not wanted.keys() <= array.sharding.device_set:
        return None
    have = {shard.device: shard for shard in array.addressable_shards}
    shards = []
    for device, index in wanted.items():
        shard = have[device]
        if _bounds(shard.index, array.shape) != _bounds(index, array.shape):
            return None
        shards.append(shard.data)
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def _bounds(index: Any, shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
    return [part.indices(size) for part, size in zip(index or (), shape, strict=True)]


def free_bytes(device: jax.Device) -> int | None:
    """Bytes that an allocation may still take, by the device's own count; None on CPU, where
    the host's memory is the limit and nobody counts."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]
