"""Putting an array where an engine wants it, without a copy wherever the bytes lie there already.

The rules of `jax.device_put` that this rests on were measured (JAX 0.8.1 and 0.10.2): between two
descriptions of one device it keeps the buffer, on the CPU platform it reads a NumPy array in
place, so that one who writes to it changes weights, and an array whose parts are not those that
are wanted goes through host memory. Such an array is put together from its parts, or, where all of
its devices want the whole of it, gathered by one program of theirs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from enginepool.weights.arrays import Array, for_jax, outside_meshes
from enginepool.weights.parts import holders, nearest, resharded, wanted

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
    elif (shards := _shards(array, sharding)) is not None:
        placed = jax.make_array_from_single_device_arrays(array.shape, sharding, shards)
    else:
        return resharded(array, sharding, dtype)
    if placed.dtype == dtype:
        return placed
    return jax.device_put(placed.astype(dtype), sharding)


def in_parts(array: Array, shardings: Sequence[Sharding]) -> bool:
    """Whether these, of engines of one device each, all want the whole of what is cut over some of
    their devices: one program gathers it for all of them."""
    if not isinstance(array, jax.Array) or array.is_fully_replicated:
        return False
    if array.sharding.memory_kind != shardings[0].memory_kind:
        return False
    theirs = {device for sharding in shardings for device in sharding.device_set}
    alone = all(len(sharding.device_set) == 1 for sharding in shardings)
    return alone and array.sharding.device_set <= theirs


def gathered(array: jax.Array, dtype: Any) -> jax.Array:
    """The whole of a sharded array, in this dtype, on each of its devices. Waits for them: what
    is not kept of it is free again before the next is gathered."""
    # Its devices in its own order, as `jit` wants them; the mesh that it came on may be anything.
    mesh = Mesh(np.array(list(array.sharding.devices_indices_map(array.shape))), ("all",))
    with _gathering, jax.set_mesh(mesh):
        gather = gather_program(NamedSharding(mesh, PartitionSpec()), np.dtype(dtype))
        return gather(array).block_until_ready()


@functools.lru_cache(maxsize=16)  # so that a program is compiled once for each shape
def gather_program(everywhere: NamedSharding, dtype: np.dtype) -> Any:
    """The program that brings a sharded array to `everywhere`, in this dtype."""
    return jax.jit(lambda array: array.astype(dtype), out_shardings=everywhere)


def lies_there(array: Any, sharding: Sharding) -> bool:
    """Whether `place` would start from the array's own buffers, and use them if no cast is due."""
    if not isinstance(array, jax.Array) or array.sharding.memory_kind != sharding.memory_kind:
        return False
    have = holders(array)
    places = wanted(array.shape, sharding).items()
    return all(device in have.get(box, ()) for device, box in places)


def _shards(array: jax.Array, sharding: Sharding) -> list[jax.Array] | None:
    """For each device just what it wants of the array, from itself if it has that, or a copy; None
    where the array is cut otherwise."""
    have, places = holders(array), wanted(array.shape, sharding)
    if not have.keys() >= set(places.values()):
        return None
    return [
        jax.device_put(
            nearest(have[box], device),
            SingleDeviceSharding(device, memory_kind=sharding.memory_kind),
        )
        for device, box in places.items()
    ]


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
