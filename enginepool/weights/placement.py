"""Puts arrays where an engine wants them. Bytes that already lie there are not copied.

This relies on three facts about `jax.device_put`, measured with JAX 0.8.1 and 0.10.2:
- Between two shardings of the same one device it keeps the buffer.
- On the CPU platform it reads a NumPy array in place. Writing to that array then changes weights.
- It moves an array through host memory if the array's parts are not the wanted parts.
In the last case the array is joined from its parts here.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from enginepool.weights.arrays import Array, for_jax, jax_dtype, outside_meshes
from enginepool.weights.converters import COPY, Converter, cast, convert
from enginepool.weights.parts import boxes, resharded

# Pairs of a device that wants a part and a device that has exactly that part.
Route = tuple[tuple[jax.Device, jax.Device], ...]


def place(array: Array, sharding: Sharding, dtype: Any, *, private: bool = False) -> jax.Array:
    """`place_all` for one array."""
    return place_all([array], [sharding], [dtype], private=private)[0]


def place_all(
    arrays: Sequence[Array],
    shardings: Sequence[Sharding],
    dtypes: Sequence[Any],
    *,
    private: bool = False,
    copy: Sequence[bool] | None = None,
) -> list[jax.Array]:
    """The arrays in these dtypes and shardings. All shardings use the same devices.

    A JAX array keeps its buffers if its shards already lie where they are wanted. These buffers are
    lost if the array's owner deletes or donates it. For `ShapeDtypeStruct` in the place of arrays,
    programs are only compiled.

    Args:
        private: Whether nobody else has the NumPy arrays. Otherwise they are copied.
        copy: Which JAX arrays are copied although their buffers could be used.
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
    for index, (array,) in zip(change, made, strict=True):
        placed[index] = array
    return placed


def _moved(
    arrays: Sequence[Array], shardings: Sequence[Sharding], dtypes: Sequence[Any], private: bool
) -> tuple[list[Any], list[int]]:
    """The arrays, moved to their devices by one call, and the indices of those to be resharded."""
    placed: list[Any] = [None] * len(arrays)
    rest: list[int] = []
    parts: list[Array] = []
    places: list[Sharding] = []
    shards: dict[int, slice] = {}  # for each array that moves, its parts in `parts`
    for index, (array, sharding) in enumerate(zip(arrays, shardings, strict=True)):
        if isinstance(array, jax.ShapeDtypeStruct):
            dtype = jax_dtype(array.dtype)
            placed[index] = jax.ShapeDtypeStruct(array.shape, dtype, sharding=sharding)
        elif isinstance(array, np.ndarray):
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
    if not parts:
        time.sleep(0)  # lets engines have the GIL, as a move would
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
    """The array, or a copy if `device_put` might read it in place and its owner may change it."""
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
    """The sharding of a whole array on this device."""
    return SingleDeviceSharding(device, memory_kind=memory_kind)


def first_of(sharding: Sharding) -> Sharding:
    """The sharding of a whole array on the first of the devices. Conversions run there: a program
    over several devices and a step of their engine might wait for each other for ever."""
    device = min(sharding.device_set, key=lambda each: each.id)
    return on(device, sharding.memory_kind)


@functools.lru_cache(maxsize=4096)
def route(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> Route | None:
    """For each device of `target`, a device that already has exactly its part; the same device if
    possible. None if the array has other parts, or lies in another kind of memory."""
    if source.memory_kind != target.memory_kind:
        return None
    have: dict[Any, list[jax.Device]] = {}
    for device, box in boxes(shape, source).items():
        have.setdefault(box, []).append(device)
    way = []
    for device, box in boxes(shape, target).items():
        if (holders := have.get(box)) is None:
            return None
        # If another device must give the part, the load is spread over those that have it.
        way.append((device, device if device in holders else holders[device.id % len(holders)]))
    return tuple(way)


def lies_there(array: Any, sharding: Sharding) -> bool:
    """Whether the array's own buffers lie where `place` wants them. Then it moves no bytes."""
    if not isinstance(array, jax.Array):
        return False
    way = route(array.sharding, sharding, array.shape)
    return way is not None and all(device == source for device, source in way)


def moves(array: Any, spec: jax.ShapeDtypeStruct) -> bool:
    """Whether `place` only copies the array's own parts to the devices, or shares them."""
    if not isinstance(array, jax.Array) or array.dtype != spec.dtype:
        return False
    assert spec.sharding is not None
    return route(array.sharding, spec.sharding, array.shape) is not None


def lends(array: Array, sharding: Sharding, dtype: Any) -> bool:
    """Whether `place` would use one of the array's own buffers."""
    if not isinstance(array, jax.Array) or array.dtype != dtype:
        return False
    way = route(array.sharding, sharding, array.shape)
    return way is not None and any(device == source for device, source in way)


def part_size(spec: Any) -> int:
    """Elements of a leaf on each of its devices."""
    return _part_size(spec.sharding, spec.shape)


@functools.lru_cache(maxsize=4096)
def _part_size(sharding: Sharding, shape: tuple[int, ...]) -> int:
    return math.prod(sharding.shard_shape(shape))


def free_bytes(device: jax.Device) -> int | None:
    """The bytes that can still be allocated on the device, by its own count. None on CPU, which
    does not count."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def least_free_bytes(devices: Iterable[jax.Device]) -> int | None:
    """The free bytes of the device that has least; None if no device counts."""
    free = [free_bytes(device) for device in devices]
    return min((bytes_ for bytes_ in free if bytes_ is not None), default=None)
