"""New weights without a pool: plain JAX on the same bytes and the same devices."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.synthetic import leaf

Leaves = dict[str, jax.Array]


def put(leaves: Leaves, devices: Sequence[jax.Device]) -> list[Leaves]:
    """Copy the leaves to each of these devices, and wait for them."""
    return jax.block_until_ready([jax.device_put(leaves, device) for device in devices])


def gather(leaves: Leaves, devices: Sequence[jax.Device]) -> Leaves:
    """Make leaves that are cut over these devices whole on each of them, in one program."""
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
    dtype: Any = None,
) -> list[Leaves]:
    """Hugging Face tensors in the model's layout, on each device. They are put on the first in one
    call, one program transposes (and casts) them there, and one call a device copies them.

    Args:
        private: Nobody else uses the tensors' memory, so a leaf may use it. Otherwise a NumPy array
            is copied, as a pool does.
    """
    first, *others = devices
    named = dict(tensors)
    paths, turned = zip(*map(leaf, named), strict=True)
    arrays = list(named.values())
    aliases = [
        turn or private or isinstance(x, jax.Array) for x, turn in zip(arrays, turned, strict=True)
    ]
    there = jax.device_put(arrays, first, may_alias=aliases)
    made = dict(zip(paths, _converted(there, turned, dtype), strict=True))
    return jax.block_until_ready([made, *(jax.device_put(made, device) for device in others)])


@functools.partial(jax.jit, static_argnums=(1, 2))
def _converted(arrays: list[jax.Array], turned: tuple[bool, ...], dtype: Any) -> list[jax.Array]:
    made = [x.T if turn else x for x, turn in zip(arrays, turned, strict=True)]
    return made if dtype is None else [x.astype(dtype) for x in made]
