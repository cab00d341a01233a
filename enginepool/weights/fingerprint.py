"""A fingerprint of weights, computed on their devices. Equal leaves have equal fingerprints.

Each element is widened to a 32-bit word. The word is multiplied by an odd number that depends on
its row and column, and the products are summed modulo 2^32. This sum is exact and commutes, so
neither the device nor its order of summation matters. The host joins the sums of all arrays, with
the paths, shapes and dtypes, by BLAKE2b (RFC 7693).
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from enginepool.weights.arrays import outside_meshes
from enginepool.weights.batches import BYTES, batched
from enginepool.weights.parts import Box, bounds, boxes

# Arrays per program. With more, a TPU's compiler is slow, and the program needs more than a MiB.
LEAVES = 8

# The most groups that `folded` makes of an axis.
_GROUPS = 16

_COLUMN, _ROW = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)
_WORD = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


class Summed(NamedTuple):
    """The `part_sums` of a leaf that was freed. They stand for the leaf in a fingerprint."""

    shape: tuple[int, ...]
    dtype: Any
    sums: np.ndarray


def fingerprints(sets: Sequence[Mapping[str, jax.Array | Summed]]) -> list[str]:
    """16 hexadecimal digits for each set of leaves. All devices work at once, and an array that
    is in several sets is read once. Waits for the devices.

    Raises:
        RuntimeError: An array was deleted. JAX raises this.
    """
    arrays = [dict(leaves) for leaves in sets]
    sums: list[jax.Array] = []  # one entry for each batch and device
    where: dict[int, list[tuple[int, int]]] = {}  # by array: for each part its entry and its index
    for leaves in arrays:
        new = {
            path: array
            for path, array in leaves.items()
            if not isinstance(array, Summed) and id(array) not in where
        }
        for batch in batched(new, str, lambda path, new=new: new[path].nbytes, BYTES, LEAVES):
            parts: dict[jax.Device, tuple[int, list[jax.Array]]] = {}
            for path in batch:
                mine = where[id(new[path])] = []
                for part in _parts(new[path]):
                    (device,) = part.devices()
                    number, here = parts.setdefault(device, (len(sums) + len(parts), []))
                    mine.append((number, len(here)))
                    here.append(part)
            with outside_meshes():
                sums += [weighted_sums(some) for _, some in parts.values()]
    values = jax.device_get(sums)
    found = {key: [values[batch][i] for batch, i in its] for key, its in where.items()}
    return [_joined(leaves, found) for leaves in arrays]


def compile_fingerprint(leaves: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[None]:
    """Compile the programs for leaves like these, one at every step."""

    def nbytes(path: str) -> int:
        return leaves[path].size * leaves[path].dtype.itemsize

    for batch in batched(leaves, str, nbytes, BYTES, LEAVES):
        parts: dict[jax.Device, list[jax.ShapeDtypeStruct]] = {}
        for path in batch:
            for device, part in _part_specs(leaves[path]):
                parts.setdefault(device, []).append(part)
        for some in parts.values():
            with outside_meshes():
                weighted_sums.lower(some).compile()
            yield


def part_sums(array: jax.Array, sharding: Sharding, *, turned: bool = False) -> jax.Array:
    """The weighted sums of the parts that this array would have in this sharding.

    Args:
        turned: Whether the array has its last two axes exchanged.
    """
    shape = array.shape[:-2] + array.shape[:-3:-1] if turned else array.shape
    sums = []
    for cut in distinct_boxes(shape, sharding):
        box = cut[:-2] + cut[:-3:-1] if turned else cut
        part = jax.lax.slice(array, *zip(*box, strict=True))
        sums.append(weighted_sum(part, turned=turned))
    return jnp.stack(sums)


def part_sums_in_stack(
    array: jax.Array, index: jax.Array, count: int, sharding: Sharding, *, turned: bool
) -> jax.Array:
    """What an array adds to the `part_sums` of a stack of arrays.

    Args:
        index, count: The array's index in the stack, and how many arrays are stacked.
        sharding: The sharding of the stack.
        turned: Whether the array has its axes exchanged.
    """
    sums = []
    shape = array.shape[::-1] if turned else array.shape
    for (start, stop, _), *cut in distinct_boxes((count, *shape), sharding):
        box = cut[::-1] if turned else cut
        part = jax.lax.slice(array, *zip(*box, strict=True))[None]
        whole = (stop - start, *part.shape[1:])
        added = weighted_sum(part, (index - start, 0, 0), whole, turned=turned)
        sums.append(jnp.where((start <= index) & (index < stop), added, 0))
    return jnp.stack(sums)


@functools.lru_cache(maxsize=4096)
def distinct_boxes(shape: tuple[int, ...], sharding: Sharding) -> tuple[Box, ...]:
    """The boxes of an array's distinct parts, sorted by their places in it."""
    places = sharding.devices_indices_map(shape).values()
    return tuple(sorted({bounds(place, shape) for place in places}))


def _joined(
    leaves: Mapping[str, jax.Array | Summed], sums: Mapping[int, Sequence[np.ndarray]]
) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path, array in leaves.items():
        digest.update(f"{path} {array.shape} {array.dtype}".encode())
        its = array.sums if isinstance(array, Summed) else sums[id(array)]
        digest.update(np.asarray(its, dtype=np.uint32).tobytes())
    return digest.hexdigest()


def _parts(array: jax.Array) -> list[jax.Array]:
    """The distinct parts of an array, sorted by their places in it."""
    if len(array.sharding.device_set) == 1:
        return [array.addressable_data(0)]
    parts = {}
    for shard in array.addressable_shards:
        parts.setdefault(bounds(shard.index, array.shape), shard.data)
    return [parts[place] for place in sorted(parts)]


def _part_specs(spec: jax.ShapeDtypeStruct) -> list[tuple[jax.Device, jax.ShapeDtypeStruct]]:
    """The specs of the parts that `_parts` would return for such an array, each with its device."""
    assert spec.sharding is not None
    first: dict[Box, jax.Device] = {}
    for device, box in boxes(spec.shape, spec.sharding).items():
        first.setdefault(box, device)
    parts = []
    for box in sorted(first):
        shape = tuple(stop - start for start, stop, _ in box)
        there = SingleDeviceSharding(first[box], memory_kind=spec.sharding.memory_kind)
        parts.append((first[box], jax.ShapeDtypeStruct(shape, spec.dtype, sharding=there)))
    return parts


@jax.jit
def weighted_sums(arrays: list[jax.Array]) -> jax.Array:
    """The weighted sum of each array. All arrays lie on one device."""
    return jnp.stack([weighted_sum(array) for array in arrays])


def weighted_sum(
    array: jax.Array,
    begin: Sequence[Any] | None = None,
    shape: tuple[int, ...] | None = None,
    *,
    turned: bool = False,
) -> jax.Array:
    """The sum of all words, each multiplied by the factor of its place.

    Args:
        begin, shape: If the array is a part of another: the index where it begins, and the other's
            shape. The sums of all parts add up to that of the other.
        turned: Whether both have their last two axes exchanged.
    """
    words = jax.lax.bitcast_convert_type(array, _WORD[array.dtype.itemsize]).astype(jnp.uint32)
    words = words.reshape((1,) * (2 - words.ndim) + words.shape)
    shape = shape or words.shape

    def place(axis: int) -> jax.Array:
        index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        return index if begin is None else index + jnp.uint32(begin[axis])

    axes = list(range(words.ndim))
    if turned:
        axes[-2:] = axes[:-3:-1]
    *rows, columns = axes
    row, count = jnp.uint32(0), 1
    for axis in reversed(rows):  # all axes but the last count as one
        row += place(axis) * np.uint32(count)
        count *= shape[axis]
    factor = (row * _ROW + place(columns) * _COLUMN) | 1
    return jax.lax.platform_dependent(words * factor, cpu=_sum_of_groups, default=_sum)


def _sum(array: jax.Array) -> jax.Array:
    return jnp.sum(array, dtype=jnp.uint32)


def _sum_of_groups(array: jax.Array) -> jax.Array:
    """Sums in two steps. XLA for CPU is many times slower when it sums to a single number. The
    barrier keeps XLA from fusing both steps."""
    some = jnp.sum(folded(array), axis=-3, dtype=jnp.uint32)
    return _sum(jax.lax.optimization_barrier(some))


def folded(array: jax.Array, axis: int = -2) -> jax.Array:
    """The array with an axis split into up to 16 groups. The groups are a new axis before it. XLA
    for CPU unrolls a reduction over so few groups, and vectorises it."""
    size, at = array.shape[axis], array.ndim + axis
    groups = math.gcd(size, _GROUPS)
    return array.reshape(*array.shape[:at], groups, size // groups, *array.shape[at + 1 :])
