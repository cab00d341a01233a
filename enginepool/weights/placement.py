"""Putting an array where an engine wants it, without a copy wherever the bytes lie there already.

The rules of `jax.device_put` that this rests on were measured (JAX 0.8.1 and 0.10.2): between two
descriptions of one device it keeps the buffer, on the CPU platform it reads a NumPy array in
place, so that one who writes to it changes weights, and an array whose parts are not those that
are wanted goes through host memory. Such an array is gathered first, by a program of its devices.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from enginepool.weights.addressable import bounds
from enginepool.weights.arrays import Array, for_jax, outside_meshes

# Two programs of several devices that two threads start at once may wait for each other for ever.
_gathering = threading.Lock()


def place(array: Array, sharding: Sharding, dtype: Any, *, private: bool = False) -> jax.Array:
    """The array with this sharding and dtype.

    A JAX array whose shards lie where `sharding` wants them is used as it is: same buffers, so
    its owner's `delete` or donation takes them away. A NumPy array is copied, unless `private`
    says that nobody else has it.
    """
    with outside_meshes():
        return _place(array, sharding, dtype, private)


def _place(array: Array, sharding: Sharding, dtype: Any, private: bool) -> jax.Array:
    if isinstance(array, np.ndarray):
        on_host = any(device.platform == "cpu" for device in sharding.device_set)
        native = for_jax(array)
        if on_host and not private and native is array and array.dtype == dtype:
            native = np.array(array)
        placed = jax.device_put(native, sharding)
    else:
        placed = _own_shards(array, sharding)
        if placed is None:
            placed = jax.device_put(array, sharding)
    if placed.dtype == dtype:
        return placed
    return jax.device_put(placed.astype(dtype), sharding)


def in_parts(array: Array, sharding: Sharding) -> bool:
    """Whether an engine of one device wants what is cut over several, so that only `gathered`
    brings it there without the host."""
    return (
        isinstance(array, jax.Array)
        and len(sharding.device_set) == 1
        and not array.sharding.is_fully_replicated
    )


def gathered(array: jax.Array, dtype: Any) -> jax.Array:
    """The whole of a sharded array, in this dtype, on each of its devices. Waits for them: what
    is not kept of it is free again before the next is gathered."""
    # Its devices in its own order, as `jit` wants them; the mesh that it came on may be anything.
    mesh = Mesh(np.array(list(array.sharding.devices_indices_map(array.shape))), ("all",))
    with _gathering, jax.set_mesh(mesh):
        gather = _gather(NamedSharding(mesh, PartitionSpec()), np.dtype(dtype))
        return gather(array).block_until_ready()


@functools.lru_cache(maxsize=16)  # so that a program is compiled once for each shape
def _gather(everywhere: NamedSharding, dtype: np.dtype) -> Any:
    return jax.jit(lambda array: array.astype(dtype), out_shardings=everywhere)


def lies_there(array: Any, sharding: Sharding) -> bool:
    """Whether `place` would start from the array's own buffers, and use them if no cast is due."""
    return isinstance(array, jax.Array) and _own_shards(array, sharding) is not None


def _own_shards(array: jax.Array, sharding: Sharding) -> jax.Array | None:
    """The array made of the shards that lie on the right devices, if all do."""
    wanted = sharding.addressable_devices_indices_map(array.shape)
    if not wanted.keys() <= array.sharding.device_set:
        return None
    have = {shard.device: shard for shard in array.addressable_shards}
    shards = []
    for device, index in wanted.items():
        shard = have[device]
        if bounds(shard.index, array.shape) != bounds(index, array.shape):
            return None
        shards.append(shard.data)
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def free_bytes(device: jax.Device) -> int | None:
    """Bytes that an allocation may still take, by the device's own count; None on CPU, where
    the host's memory is the limit and nobody counts."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def least_free_bytes(devices: Iterable[jax.Device]) -> int | None:
    """The same of the device that has least; None where none of them counts."""
    free = [free_bytes(device) for device in devices]
    return min((bytes_ for bytes_ in free if bytes_ is not None), default=None)
