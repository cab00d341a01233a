"""Quantizes matrices that are sharded over the engines' devices, before they are gathered.

Every device quantizes its own part, and sends integers. So no device quantizes the whole matrix,
and fewer bytes are sent.

A scale needs the largest element of a whole output, whose parts may lie on several devices. So the
devices first exchange the largest elements of their parts.

A matrix that is made of several tensors (the experts of a checkpoint) is gathered first, and every
device quantizes all of it. If only one engine reads the source (staging="stream" or
strategy="rolling"), or if an engine has several devices, this module is not used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from enginepool.weights.arrays import outside_meshes
from enginepool.weights.converters import PROGRAMS, Converter
from enginepool.weights.fingerprint import weighted_sum
from enginepool.weights.gathering import (
    Devices,
    Kind,
    Shards,
    gathered,
    kind_of,
    mesh_of,
    parts_of,
    stacked,
)
from enginepool.weights.quantizer import Quantizer
from enginepool.weights.rounding_error import OutputErrors

_FLOAT, _WORD = np.dtype(np.float32), np.dtype(np.uint32)


class ShardedMatrix(NamedTuple):
    """What the programs must know of a matrix. Equal layers share a program.

    Attributes:
        quantizer: Without paths.
        kind: The kind of the tensor that the trainer has.
        axis: The axis of the inputs in this tensor: -2, or -1 if it is transposed.
    """

    quantizer: Quantizer
    kind: Kind
    axis: int

    @property
    def largest(self) -> Kind:
        """The kind of what `largest_program` makes."""
        return Kind(_one_input(self.kind.part, self.axis), _FLOAT, self.kind.holders)

    @property
    def quantized(self) -> tuple[Kind, Kind, Kind]:
        """The kinds of what `quantize_program` makes."""
        part, _, holders = self.kind
        scales = (len(OutputErrors._fields) + 1, *_one_input(part, self.axis))
        return (
            Kind(part, self.quantizer.to, holders),
            Kind(scales, _WORD, tuple(((0, *begin), index) for begin, index in holders)),
            Kind((1,) * len(part), _WORD, holders),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        *more, inputs, outputs = self.quantizer.shape
        return (*more, inputs, outputs) if self.axis == -2 else (*more, outputs, inputs)

    @property
    def largest_shape(self) -> tuple[int, ...]:
        """The shape of the largest elements of all outputs."""
        return _one_input(self.shape, self.axis)


def _one_input(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return tuple(1 if i == len(shape) + axis else n for i, n in enumerate(shape))


def sharded_matrix(
    quantizer: Quantizer, converter: Converter, tensors: Sequence[Any], devices: Devices
) -> ShardedMatrix | None:
    """The matrix that the converter makes of these tensors, which are sharded over the devices.
    None if it must be gathered before it is quantized."""
    tensor = tensors[0]
    # If a tensor is cast to float16 and then to float32, a compiler may leave out the first cast.
    if converter.swaps is None or quantizer.dtype == np.float16 != tensor.dtype:
        return None
    kind = kind_of(tensor.shape, tensor.dtype, tensor.sharding, devices)
    unnamed = replace(quantizer, path="", leaves=("", ""))
    return ShardedMatrix(unnamed, kind, -1 if converter.swaps else -2)


def quantized_shards(
    matrices: Sequence[ShardedMatrix], shards: Sequence[Shards], devices: Devices
) -> list[tuple[Converter, list[Shards]]]:
    """Quantize every part on its device.

    Returns:
        For each matrix: a converter and its tensors. `gathered` takes both. The converter makes the
        integers, the scales, the error, and the `part_sums` of the matrix.
    """
    if not matrices:
        return []
    key = tuple(matrices)
    with outside_meshes():
        parts = [stacked(each.parts, devices) for each in shards]
        found = largest_program(key, devices)(parts)
        groups = [
            [Shards(parts_of(array), matrix.largest)]
            for matrix, array in zip(matrices, found, strict=True)
        ]
        whole = gathered([of_all(matrix.axis) for matrix in matrices], groups, devices)
        made = quantize_program(key, devices)(parts, [largest for (largest,) in whole])
    return [
        (joining(matrix), list(map(Shards, map(parts_of, arrays), matrix.quantized)))
        for matrix, arrays in zip(matrices, made, strict=True)
    ]


def of_all(axis: int) -> Converter:
    """The converter that finds each output's largest element among those of its parts."""
    make = lambda parts: (parts.max(axis=axis, keepdims=True),)  # noqa: E731
    return Converter(f"largest of {axis}", None, False, make)


@functools.lru_cache(maxsize=PROGRAMS)
def largest_program(
    matrices: tuple[ShardedMatrix, ...], devices: Devices
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """The program in which each device finds the largest elements of its parts' outputs."""

    def find(parts: list[jax.Array]) -> list[jax.Array]:
        return [
            _wide(matrix, jnp.abs(part).max(axis=matrix.axis, keepdims=True))
            for matrix, part in zip(matrices, parts, strict=True)
        ]

    spec = PartitionSpec("all")
    return jax.jit(jax.shard_map(find, mesh=mesh_of(devices), in_specs=spec, out_specs=spec))


@functools.lru_cache(maxsize=PROGRAMS)
def quantize_program(
    matrices: tuple[ShardedMatrix, ...], devices: Devices
) -> Callable[[list[jax.Array], list[jax.Array]], list[tuple[jax.Array, ...]]]:
    """The program in which each device quantizes its parts. For each matrix it makes the integers,
    the scales with the `OutputErrors`, and the part's sum for a fingerprint.

    Its arguments are the parts, and the largest elements of all outputs.
    """

    def quantize(parts: list[jax.Array], largest: list[jax.Array]) -> list[tuple[jax.Array, ...]]:
        device = jax.lax.axis_index("all")
        made: list[tuple[jax.Array, ...]] = []
        for matrix, part, whole in zip(matrices, parts, largest, strict=True):
            if made:  # one after the other, because each needs temporary memory
                part, made[-1] = jax.lax.optimization_barrier((part, made[-1]))
            made.append(_quantized(matrix, part, whole, _begins(matrix.kind, devices)[device]))
        return made

    here, everywhere = PartitionSpec("all"), PartitionSpec()
    mesh = mesh_of(devices)
    return jax.jit(jax.shard_map(quantize, mesh=mesh, in_specs=(here, everywhere), out_specs=here))


def _quantized(
    matrix: ShardedMatrix, part: jax.Array, whole: jax.Array, begin: jax.Array
) -> tuple[jax.Array, ...]:
    """
    Args:
        begin: The index in the tensor where the part begins.
    """
    quantizer, kind, axis = matrix
    inputs = part.ndim + axis
    first = [0 if i == inputs else begin[i] for i in range(part.ndim)]
    largest = jax.lax.dynamic_slice(whole, first, _one_input(kind.part, axis))
    scale = quantizer.scale(largest)
    integers, errors = quantizer.rounded(functools.partial(_wide, matrix), (part,), scale, axis)
    # Scales are sent as words, in one pack with the sums.
    scales = jax.lax.bitcast_convert_type(jnp.stack([scale, *errors]), jnp.uint32)
    own = part.astype(quantizer.dtype)
    total = weighted_sum(own, list(begin), matrix.shape, turned=axis == -1)
    return integers, scales, total.reshape((1,) * part.ndim)


def _begins(kind: Kind, devices: Devices) -> jax.Array:
    """Where each device's part begins. Zeros for a device that sends nothing, because another
    device sends the same part."""
    begins = np.zeros((len(devices), len(kind.part)), np.int32)
    for begin, index in kind.holders:
        begins[index] = begin
    return jnp.asarray(begins)


def _wide(matrix: ShardedMatrix, part: jax.Array) -> jax.Array:
    """A part in float32, rounded to the dtype of the matrix. If a part is cast to bfloat16 and then
    to float32, a compiler may leave out the first cast."""
    wide = part.astype(jnp.float32)
    if matrix.quantizer.dtype == jnp.bfloat16 != part.dtype:
        info = jnp.finfo(jnp.bfloat16)
        wide = jax.lax.reduce_precision(wide, info.nexp, info.nmant)
    return wide


def joining(matrix: ShardedMatrix) -> Converter:
    """The converter that takes the gathered results of `quantize_program` for a matrix. It makes
    the integers, the scales, the error and the `part_sums`."""
    quantizer, _, axis = matrix

    def join(integers: jax.Array, words: jax.Array, sums: jax.Array) -> tuple[jax.Array, ...]:
        scale, *errors = jax.lax.bitcast_convert_type(words, jnp.float32)
        norm, lost, most = errors
        whole = OutputErrors(
            norm.sum(axis=axis, keepdims=True),
            lost.sum(axis=axis, keepdims=True),
            most.max(axis=axis, keepdims=True),
        )
        scale = scale.max(axis=axis, keepdims=True)
        total = jnp.sum(sums, dtype=jnp.uint32)
        return *quantizer.finished(integers, scale, whole, axis), total[None]

    return Converter(f"joined: {quantizer} {axis}", None, False, join, in_turn=True)
