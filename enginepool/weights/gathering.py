"""Gathers tensors that are sharded over several devices: each device gets the whole tensor.

Every device packs its small parts into one array. The packs and the large parts are copied to the
other devices, and every device joins them. Each program is compiled once for all devices, but it
never communicates. A program that communicates makes every device wait for the slowest engine's
step. If a trainer starts another such program in a second thread, the two may wait for each other
for ever.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from enginepool.weights.arrays import Array, outside_meshes
from enginepool.weights.converters import PROGRAMS, Converter, make_leaves
from enginepool.weights.parts import Box, bounds

# A part of at least this many bytes is not packed: that would take longer than another transfer.
_LARGE = 1 << 18

Devices = tuple[jax.Device, ...]
Parts = Mapping[jax.Device, jax.Array]  # of one array, by the device that has it


class Kind(NamedTuple):
    """What programs must know of a tensor.

    Attributes:
        part: The shape of each device's part.
        holders: Where each part of the tensor begins, and the index of the device that sends it.
    """

    part: tuple[int, ...]
    dtype: np.dtype
    holders: tuple[tuple[tuple[int, ...], int], ...]

    @property
    def small(self) -> bool:
        return math.prod(self.part) * self.dtype.itemsize < _LARGE


class Shards(NamedTuple):
    """A tensor that is sharded over the devices."""

    parts: Parts
    kind: Kind


def gathering_devices(arrays: Iterable[Array], shardings: Sequence[Sharding]) -> Devices | None:
    """The devices that all of these arrays are sharded over, if `gathered` can gather them there.
    None if the arrays are on other devices than the engines', or if an engine has several."""
    found: set[Devices | None] = set()
    for array in arrays:
        if not isinstance(array, jax.Array) or array.is_fully_replicated:
            return None
        found.add(_cut_over(array.sharding, tuple(shardings)))
    return found.pop() if len(found) == 1 else None


@functools.lru_cache(maxsize=4096)
def _cut_over(source: Sharding, shardings: tuple[Sharding, ...]) -> Devices | None:
    theirs = {device for sharding in shardings for device in sharding.device_set}
    alone = all(len(sharding.device_set) == 1 for sharding in shardings)
    if not alone or source.memory_kind != shardings[0].memory_kind:
        return None
    in_order = tuple(sorted(source.device_set, key=lambda device: device.id))
    return in_order if source.device_set <= theirs else None


def shards_of(tensor: jax.Array, devices: Devices) -> Shards:
    kind = kind_of(tensor.shape, tensor.dtype, tensor.sharding, devices)
    return Shards(parts_of(tensor), kind)


def gathered(
    converters: Sequence[Converter], tensors: Sequence[Sequence[Shards]], devices: Devices
) -> list[tuple[jax.Array, ...]]:
    """Make leaves from tensors that are sharded over these devices. Each device gets all leaves."""
    flat = [tensor for group in tensors for tensor in group]
    kinds = tuple(tensor.kind for tensor in flat)
    sizes = tuple(len(group) for group in tensors)
    loads = [tensor.parts for tensor in flat if not tensor.kind.small]
    with outside_meshes():
        if small := [tensor for tensor in flat if tensor.kind.small]:
            pack = pack_program(tuple(tensor.kind for tensor in small), devices)
            loads += map(parts_of, pack([stacked(tensor.parts, devices) for tensor in small]))
        sent = _sent(loads, senders_of(kinds), devices)
        return join_program(tuple(converters), sizes, kinds, devices)(sent)


def parts_of(array: jax.Array) -> Parts:
    return {shard.device: shard.data for shard in array.addressable_shards}


@functools.lru_cache(maxsize=4096)
def kind_of(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding, devices: Devices) -> Kind:
    places = sharding.devices_indices_map(shape)
    first: dict[Box, int] = {}
    for index, device in enumerate(devices):
        first.setdefault(bounds(places[device], shape), index)
    holders = tuple((tuple(start for start, *_ in box), index) for box, index in first.items())
    return Kind(sharding.shard_shape(shape), dtype, holders)


def stacked(parts: Parts, devices: Devices) -> jax.Array:
    """The devices' parts as one array, one after the other along the first axis. Nothing moves."""
    length, *rest = parts[devices[0]].shape
    return jax.make_array_from_single_device_arrays(
        (length * len(devices), *rest), _cut(devices), [parts[device] for device in devices]
    )


@functools.lru_cache(maxsize=PROGRAMS)
def pack_program(kinds: tuple[Kind, ...], devices: Devices) -> Callable[[list[jax.Array]], Any]:
    """The program in which each device packs its parts into one array per dtype."""

    def pack(parts: list[jax.Array]) -> list[jax.Array]:
        packs: dict[np.dtype, list[jax.Array]] = {}
        for part, kind in zip(parts, kinds, strict=True):
            packs.setdefault(kind.dtype, []).append(part.reshape(-1))
        return [jnp.concatenate(its) for its in packs.values()]

    spec = _cut(devices).spec
    return jax.jit(jax.shard_map(pack, mesh=mesh_of(devices), in_specs=spec, out_specs=spec))


def senders_of(kinds: Sequence[Kind]) -> list[list[int]]:
    """For each load, the indices of the devices that send it. A load is a large tensor, or a pack
    of the small tensors of one dtype. The large tensors come first."""
    packs: dict[np.dtype, set[int]] = {}
    for kind in kinds:
        if kind.small:
            packs.setdefault(kind.dtype, set()).update(index for _, index in kind.holders)
    large = [[index for _, index in kind.holders] for kind in kinds if not kind.small]
    return large + [sorted(indices) for indices in packs.values()]


def _sent(
    loads: Sequence[Parts], senders: Sequence[Sequence[int]], devices: Devices
) -> list[list[jax.Array]]:
    """For each load, the arrays of its senders. Each array is copied to all of these devices."""
    ways = [
        (its[devices[sender]], target)
        for its, indices in zip(loads, senders, strict=True)
        for sender in indices
        for target in devices
        if target != devices[sender]
    ]
    moved = iter(
        jax.device_put([part for part, _ in ways], [SingleDeviceSharding(to) for _, to in ways])
    )
    return [
        [
            jax.make_array_from_single_device_arrays(
                its[devices[sender]].shape,
                _whole(devices),
                [its[to] if to == devices[sender] else next(moved) for to in devices],
            )
            for sender in indices
        ]
        for its, indices in zip(loads, senders, strict=True)
    ]


@functools.lru_cache(maxsize=PROGRAMS)
def join_program(
    converters: tuple[Converter, ...],
    sizes: tuple[int, ...],
    kinds: tuple[Kind, ...],
    devices: Devices,
) -> Callable[[list[list[jax.Array]]], Any]:
    """The program by which each device makes all leaves.

    Args:
        sizes: How many tensors each leaf is made of.
    """
    from_devices = senders_of(kinds)
    dtypes = list(dict.fromkeys(kind.dtype for kind in kinds if kind.small))

    def unpack(sent: list[list[jax.Array]]) -> list[tuple[jax.Array, ...]]:
        loads = [dict(zip(*each, strict=True)) for each in zip(from_devices, sent, strict=True)]
        large, packs = (
            iter(loads),
            dict(zip(dtypes, loads[len(loads) - len(dtypes) :], strict=True)),
        )
        begins, parts = dict.fromkeys(dtypes, 0), []
        for kind in kinds:
            if kind.small:
                begin = begins[kind.dtype]
                begins[kind.dtype] = end = begin + math.prod(kind.part)
                its = {i: x[begin:end].reshape(kind.part) for i, x in packs[kind.dtype].items()}
            else:
                its = next(large)
            parts.append({place: its[index] for place, index in kind.holders})
        rest = iter(parts)
        groups = [[next(rest) for _ in range(size)] for size in sizes]
        return make_leaves(converters, groups, _joined)

    return jax.jit(unpack, out_shardings=_whole(devices))


def _joined(parts: dict[tuple[int, ...], jax.Array]) -> jax.Array:
    """Join parts to a whole array.

    Args:
        parts: The parts, by the index in the array where each begins.
    """
    (axes,) = {len(place) for place in parts}
    for axis in range(axes):
        rows: dict[tuple[int, ...], list[jax.Array]] = {}
        for place in sorted(parts):
            rows.setdefault((*place[:axis], 0, *place[axis + 1 :]), []).append(parts[place])
        parts = {
            place: row[0] if len(row) == 1 else jnp.concatenate(row, axis)
            for place, row in rows.items()
        }
    (whole,) = parts.values()
    return whole


@functools.cache
def mesh_of(devices: Devices) -> Mesh:
    """A mesh of these devices with one axis, "all"."""
    return Mesh(np.array(devices), ("all",))


@functools.cache
def _cut(devices: Devices) -> NamedSharding:
    return NamedSharding(mesh_of(devices), PartitionSpec("all"))


@functools.cache
def _whole(devices: Devices) -> NamedSharding:
    return NamedSharding(mesh_of(devices), PartitionSpec())
