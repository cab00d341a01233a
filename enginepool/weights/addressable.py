"""The local copy of a global array, if this process's devices hold all of it.

In a JAX program of several processes a trainer's arrays span all processes. An engine works in its
own process alone. So no program may run over a global array here: it would wait for the other
processes.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from enginepool.errors import InvalidWeights
from enginepool.weights.parts import bounds

_REMEDY = (
    "before update_weights, every process of the trainer has to call, on all of its arrays, "
    "jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))(tree). A "
    "sharding over the mesh axes within a process will do as well"
)


def addressable(name: str, array: jax.Array) -> jax.Array:
    """The array on this process's devices alone, in the same buffers.

    Raises:
        InvalidWeights: These devices do not hold the whole array. The error names the collective
            that brings it to them.
    """
    if array.is_fully_addressable:
        return array
    shape, shards = array.shape, array.addressable_shards
    sharding = _within(array, [shard.device for shard in shards]) if shards else None
    if sharding is None:
        parts = len({bounds(i, shape) for i in _places(array).values()})
        have = len({bounds(shard.index, shape) for shard in shards})
        raise InvalidWeights(
            f"{name}: process {jax.process_index()} has {have} of the {parts} parts of this array, "
            f"and its engines need all; {_REMEDY}",
            names=[name],
        )
    parts = [shard.data for shard in shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _within(array: jax.Array, devices: list[jax.Device]) -> NamedSharding | None:
    """The array's sharding, restricted to these devices; None if they do not hold all of it."""
    if array.is_fully_replicated:
        return NamedSharding(Mesh(np.array(devices), ("all",)), PartitionSpec())
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    mesh = sharding.mesh
    here = np.isin(mesh.device_ids, [device.id for device in devices])
    # The block of the mesh that spans the local devices. If it has a device of another process,
    # it is larger than the list of local devices.
    block = mesh.devices[np.ix_(*map(np.unique, here.nonzero()))]
    if block.size != len(devices):
        return None
    local = Mesh(block, mesh.axis_names, axis_types=mesh.axis_types)
    made = NamedSharding(local, sharding.spec, memory_kind=sharding.memory_kind)
    there, shape = _places(array), array.shape
    places = made.devices_indices_map(shape)
    same = all(bounds(places[device], shape) == bounds(there[device], shape) for device in places)
    return made if same else None


def _places(array: jax.Array) -> Any:
    return array.sharding.devices_indices_map(array.shape)
