"""What new weights cost without a pool: plain JAX on the same bytes and the same devices."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.synthetic import leaf

Leaves = dict[str, jax.Array]

_transpose = jax.jit(lambda array: array.T)


def put(leaves: Leaves, devices: Sequence[jax.Device]) -> list[Leaves]:
    """The leaves on each of these devices, there when this returns."""
    return jax.block_until_ready([jax.device_put(leaves, device) for device in devices])


def gather(leaves: Leaves, devices: Sequence[jax.Device]) -> Leaves:
    """The whole of leaves that are cut over these devices, in one program: a set on each device."""
    return jax.block_until_ready(_gather(tuple(devices))(leaves))


@functools.cache
def _gather(devices: tuple[jax.Device, ...]) -> Any:
    everywhere = NamedSharding(Mesh(np.array(devices), ("all",)), PartitionSpec())
    return jax.jit(lambda leaves: leaves, out_shardings=everywhere)


def convert(
    tensors: Iterable[tuple[str, np.ndarray | jax.Array]],
    devices: Sequence[jax.Device],
    *,
    private: bool = False,
) -> list[Leaves]:
    """Hugging Face tensors in the model's layout on each device: put on the first, transposed
    there, each by one XLA program, and put from there on the others.

    Args:
        private: Nobody else has the tensors' memory, so a leaf may go on in it. Without it a
            NumPy array's must be copied, as a pool must.
    """
    first, *others = devices
    made: Leaves = {}
    for name, tensor in tensors:
        path, turned = leaf(name)
        may_alias = None if turned or private or isinstance(tensor, jax.Array) else False
        array = jax.device_put(tensor, first, may_alias=may_alias)
        made[path] = _transpose(array) if turned else array
        del tensor, array
    return jax.block_until_ready([made, *(jax.device_put(made, device) for device in others)])


def memcpy_seconds(nbytes: int) -> float:
    """One thread's, between two places of host memory that are in use already."""
    source = np.ones(nbytes, np.uint8)
    target = np.zeros(nbytes, np.uint8)
    target.fill(1)
    started = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started
