"""Putting arrays where an engine wants them, without a copy wherever the bytes lie there already.

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
from enginepool.weights.converters import COPY, Converter, cast, convert, program
from enginepool.weights.parts import boxes, resharded

# Two programs of several devices that two threads start at once may wait for each other for ever.
_gathering = threading.Lock()

# For each device that is to have a part: the device that has just that.
Route = tuple[tuple[jax.Device, jax.Device], ...]


def place(array: Array, sharding: Sharding, dtype: Any, *, private: bool = False) -> jax.Array:
    """`place_all` of one array."""
    return place_all([array], [sharding], [dtype], private=private)[0]


def place_all(
    arrays: Sequence[Array],
    shardings: Sequence[Sharding],
    dtypes: Sequence[Any],
    *,
    private: bool = False,
    copy: Sequence[bool] | None = None,
) -> list[jax.Array]:
    """The arrays with these shardings, all over the same devices, and dtypes.

    A JAX array whose shards lie where its sharding wants them is used as it is: same buffers, so
    its owner's `delete` or donation takes them away.

    Args:
        private: Nobody else has the NumPy arrays. Otherwise they are copied.
        copy: Which JAX arrays are copied even so.
    """
    with outside_meshes():
        placed, rest = _moved(arrays, shardings, dtypes, private)
        if rest:
            cut: list[Any] = [arrays[i] for i in rest]
            made = resharded(cut, [shardings[i] for i in rest], [dtypes[i] for i in rest])
            for index, array in zip(rest, made, strict=True):
                placed[index] = array
    change: dict[int, Converter] = {}
    for index, (array, dtype) in enumerate(zip(placed, dtypes, strict=True)):
        if array.dtype != dtype:
            change[index] = cast(np.dtype(dtype))
        elif copy is not None and copy[index]:
            change[index] = COPY
    made = convert(
        [*change.values()], [[placed[i]] for i in change], [shardings[i] for i in change]
    )
    for index, array in zip(change, made, strict=True):
        placed[index] = array
    return placed


def _moved(
    arrays: Sequence[Array], shardings: Sequence[Sharding], dtypes: Sequence[Any], private: bool
) -> tuple[list[Any], list[int]]:
    """The arrays on their devices, by one call, and which of them are cut otherwise."""
    placed: list[Any] = [None] * len(arrays)
    rest: list[int] = []
    parts: list[Array] = []
    places: list[Sharding] = []
    shards: dict[int, slice] = {}  # of an array that is put together from what moves
    for index, (array, sharding) in enumerate(zip(arrays, shardings, strict=True)):
        if isinstance(array, np.ndarray):
            shards[index] = slice(len(parts), len(parts) + 1)
            parts.append(_readable(array, sharding, dtypes[index], private))
            places.append(sharding)
        elif (way := route(array.sharding, sharding, array.shape)) is None:
            rest.append(index)
        elif all(device == source for device, source in way):
            own = [_part(array, device) for device, _ in way]
            placed[index] = jax.make_array_from_single_device_arrays(array.shape, sharding, own)
        else:
            shards[index] = slice(len(parts), len(parts) + len(way))
            parts += [_part(array, source) for _, source in way]
            kind = sharding.memory_kind
            places += [sharding] if len(way) == 1 else [on(device, kind) for device, _ in way]
    there = jax.device_put(parts, places)
    for index, span in shards.items():
        made = there[span]
        placed[index] = (
            made[0]
            if len(made) == 1
            else jax.make_array_from_single_device_arrays(
                arrays[index].shape, shardings[index], made
            )
        )
    return placed, rest


def _readable(array: np.ndarray, sharding: Sharding, dtype: Any, private: bool) -> np.ndarray:
    """What `device_put` may read in place."""
    native = for_jax(array)
    if private or native is not array or array.dtype != dtype:
        return native
    on_host = any(device.platform == "cpu" for device in sharding.device_set)
    return np.array(array) if on_host else native


def _part(array: jax.Array, device: jax.Device) -> jax.Array:
    if len(array.sharding.device_set) == 1:
        return array
    return next(shard.data for shard in array.addressable_shards if shard.device == device)


@functools.cache
def on(device: jax.Device, memory_kind: str | None = None) -> SingleDeviceSharding:
    """The whole of an array on this device."""
    return SingleDeviceSharding(device, memory_kind=memory_kind)


@functools.lru_cache(maxsize=4096)
def route(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> Route | None:
    """Who has just the parts that `target` wants: a device itself if it can. None where the array
    is cut otherwise, or lies in another kind of memory."""
    if source.memory_kind != target.memory_kind:
        return None
    have: dict[Any, list[jax.Device]] = {}
    for device, box in boxes(shape, source).items():
        have.setdefault(box, []).append(device)
    way = []
    for device, box in boxes(shape, target).items():
        if (holders := have.get(box)) is None:
            return None
        # From another than itself, not always from the same.
        way.append((device, device if device in holders else holders[device.id % len(holders)]))
    return tuple(way)


def lies_there(array: Any, sharding: Sharding) -> bool:
    """Whether `place` would start from the array's own buffers, and use them if no cast is due."""
    if not isinstance(array, jax.Array):
        return False
    way = route(array.sharding, sharding, array.shape)
    return way is not None and all(device == source for device, source in way)


def lends(array: Array, sharding: Sharding, dtype: Any) -> bool:
    """Whether `place` would use one of the array's own buffers."""
    if not isinstance(array, jax.Array) or array.dtype != dtype:
        return False
    way = route(array.sharding, sharding, array.shape)
    return way is not None and any(device == source for device, source in way)


def gathering_devices(
    arrays: Iterable[Array], shardings: Sequence[Sharding]
) -> tuple[jax.Device, ...] | None:
    """The devices that these arrays are cut over, in their order, if it is the same for all and
    the engines that want them whole are of one device each: one program gathers them. None if it
    is otherwise."""
    found: set[tuple[jax.Device, ...] | None] = set()
    for array in arrays:
        if not isinstance(array, jax.Array) or array.is_fully_replicated:
            return None
        found.add(_cut_over(array.sharding, array.shape, tuple(shardings)))
    return found.pop() if len(found) == 1 else None


@functools.lru_cache(maxsize=4096)
def _cut_over(
    source: Sharding, shape: tuple[int, ...], shardings: tuple[Sharding, ...]
) -> tuple[jax.Device, ...] | None:
    theirs = {device for sharding in shardings for device in sharding.device_set}
    alone = all(len(sharding.device_set) == 1 for sharding in shardings)
    if not alone or source.memory_kind != shardings[0].memory_kind:
        return None
    # In its own order, as `jit` wants them; the mesh that it came on may be anything.
    return tuple(source.devices_indices_map(shape)) if source.device_set <= theirs else None


def gathered(
    converters: Sequence[Converter],
    tensors: Sequence[Sequence[jax.Array]],
    devices: tuple[jax.Device, ...],
) -> list[jax.Array]:
    """The leaves that are made of sharded tensors, whole on each of their devices. Waits for them:
    what is not kept of it is free again before the next are gathered."""
    everywhere = NamedSharding(mesh := mesh_of(devices), PartitionSpec())
    make = program(tuple(converters), (everywhere,) * len(converters))
    with _gathering, jax.set_mesh(mesh):
        return jax.block_until_ready(make([list(group) for group in tensors]))


@functools.cache
def mesh_of(devices: tuple[jax.Device, ...]) -> Mesh:
    """Of one axis, "all"."""
    return Mesh(np.array(devices), ("all",))


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
