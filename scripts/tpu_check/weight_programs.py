"""Compiles the programs that an update of weights runs on an engine's chip, for every kind of
batch.

Imports sgl_jax: import it only after the patches are applied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from enginepool.doctor.ahead_of_time.record import Record
from enginepool.doctor.ahead_of_time.stand_ins import AbstractArray
from enginepool.weights import (
    batches,
    converters,
    fingerprint,
    gathering,
    parts,
    shard_quantizing,
    tied,
)
from enginepool.weights.arrays import outside_meshes
from enginepool.weights.shard_quantizing import sharded_matrix


def weight_programs(scheduler: Any, chips: list[Any], record: Record) -> None:
    """Compile the programs for fingerprints, casts, copies, cutting, joining, gathering and the
    conversion of a checkpoint."""
    leaves, mapping = scheduler.leaves, scheduler.hugging_face
    specs, quantizing = leaves.source_specs, _Quantizing(leaves)
    seen: set[Any] = set()

    def size(path: str) -> int:
        return specs[path].size * specs[path].dtype.itemsize

    def name(batch: Sequence[str]) -> str:
        first = batch[0].rpartition("layers.0.")[2]
        return f"{first} and {len(batch) - 1} more" if len(batch) > 1 else first

    limit = max(batches.BYTES, *map(size, specs))
    for batch in batches.batched(specs, str, size, limit):
        shapes = tuple((specs[path].shape, specs[path].dtype) for path in batch)
        if shapes not in seen:
            seen.add(shapes)
            _of_leaves(
                {path: specs[path] for path in batch}, quantizing, chips, name(batch), record
            )
        # Leaves in the engine's own layout need no conversion.
        paths = [path for path in batch if path in mapping.names and not mapping.keeps(path)]
        kinds = tuple(map(mapping.kind, paths))
        if paths and kinds not in seen:
            seen.add(kinds)
            of_these = {path: specs[path] for path in paths}
            _conversion(mapping, of_these, quantizing, chips, name(batch), record)
    if record.wants("fingerprint"):
        specs = leaves.specs
        for batch in batches.batched(specs, str, size, batches.BYTES, fingerprint.LEAVES):
            arrays = [_on(chips[0], specs[path]) for path in batch]
            record.add("fingerprint", name(batch), fingerprint.weighted_sums.lower(arrays))
    _tied_head(leaves.specs, chips[0], record)


class _Quantizing:
    """Lets the converter of a leaf also quantize it, if the model quantizes this leaf."""

    def __init__(self, leaves: Any) -> None:
        self._specs = leaves.specs
        self._quantizers = {} if leaves.quantization is None else leaves.quantization.of

    def converter(self, path: str, converter: Any, *, turned: bool = False) -> Any:
        quantizer = self._quantizers.get(path)
        if quantizer is None:
            return converter
        there = self._specs[quantizer.leaves[0]].sharding
        return quantizer.after(converter, quantizer.turned_sharding(there), transposes=turned)

    def sharded(self, path: str, converter: Any, tensors: Any, chips: list[Any]) -> Any:
        """What is quantized before it is gathered, or None."""
        quantizer = self._quantizers.get(path)
        if quantizer is None:
            return None
        return sharded_matrix(quantizer, converter, tensors, tuple(chips))


def _on(chip: Any, spec: Any) -> AbstractArray:
    return AbstractArray(spec.shape, spec.dtype, SingleDeviceSharding(chip))


def _of_leaves(
    leaves: Mapping[str, Any], quantizing: _Quantizing, chips: list[Any], name: str, record: Record
) -> None:
    specs = leaves.values()
    wide = [[_on(chips[0], jax.ShapeDtypeStruct(spec.shape, jnp.float32))] for spec in specs]
    plain = {path: converters.cast(spec.dtype) for path, spec in leaves.items()}
    casts = [quantizing.converter(path, make) for path, make in plain.items()]
    if record.wants("cast"):
        there = [SingleDeviceSharding(chips[0])] * len(casts)
        record.add("cast", name, _lowered(casts, wide, there))
    if record.wants("copy"):
        arrays = [[_on(chips[0], spec)] for spec in specs]
        shardings = [spec.sharding for spec in specs]
        record.add("copy", name, _lowered([converters.COPY] * len(specs), arrays, shardings))
    _parts(list(specs), chips, name, record)
    if record.wants("gather"):
        for dtype in {jnp.dtype(jnp.float32), *(spec.dtype for spec in specs)}:
            groups = [[_cut(spec.shape, dtype, chips)] for spec in specs]
            matrices = [
                quantizing.sharded(path, make, group, chips)
                for (path, make), group in zip(plain.items(), groups, strict=True)
            ]
            _gathered(casts, groups, matrices, chips, f"{name} of {dtype}", record)


def _parts(leaves: Sequence[Any], chips: list[Any], name: str, record: Record) -> None:
    """The program that cuts a chip's shard out of whole leaves, and the program that joins shards
    to whole leaves."""
    shares, boxes, how = [], [], []
    for spec in leaves:
        axis = _axis(spec.shape, chips)
        if axis is None:
            continue
        size = spec.shape[axis] // len(chips)
        shape = tuple(size if i == axis else n for i, n in enumerate(spec.shape))
        share = _on(chips[0], jax.ShapeDtypeStruct(shape, spec.dtype))
        shares.append([share] * len(chips))
        boxes.append((tuple((0, n) for n in shape), spec.dtype))
        starts = [
            tuple(i * size if j == axis else 0 for j in range(len(shape)))
            for i in range(len(chips))
        ]
        how.append((tuple(starts), spec.shape, spec.dtype))
    if record.wants("cut"):
        whole = [_on(chips[0], spec) for spec in leaves if _axis(spec.shape, chips) is not None]
        record.add("cut", name, parts._cut.lower(whole, tuple(boxes)))
    if record.wants("join"):
        record.add("join", name, parts._join.lower(shares, tuple(how)))


def _conversion(
    mapping: Any,
    leaves: Mapping[str, Any],
    quantizing: _Quantizing,
    chips: list[Any],
    name: str,
    record: Record,
) -> None:
    """Upstream's transposes, reshapes and stacking: of leaves on one chip, and of leaves that are
    sharded over all chips."""
    on_chip = SingleDeviceSharding(chips[0])
    makes, whole, cut, matrices = [], [], [], []
    for path, spec in leaves.items():
        shape = mapping.source_shape(path)
        tensor = jax.ShapeDtypeStruct(shape, spec.dtype)
        converter = mapping.converter(path, dict.fromkeys(mapping.names[path], tensor))
        makes.append(quantizing.converter(path, converter, turned=mapping.turned(path)))
        count = len(mapping.names[path])
        whole.append([AbstractArray(shape, spec.dtype, on_chip)] * count)
        cut.append([_cut(shape, spec.dtype, chips)] * count)
        matrices.append(quantizing.sharded(path, converter, cut[-1], chips))
    if record.wants("convert"):
        record.add("convert", name, _lowered(makes, whole, [on_chip] * len(makes)))
    if record.wants("gather"):
        _gathered(makes, cut, matrices, chips, f"and convert {name}", record)


def _cut(shape: Any, dtype: Any, chips: list[Any]) -> AbstractArray:
    """An array of a trainer, sharded over all chips, or replicated if it cannot be sharded."""
    axis = _axis(shape, chips)
    spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "all")
    return AbstractArray(shape, dtype, NamedSharding(gathering.mesh_of(tuple(chips)), spec))


def _axis(shape: Sequence[int], chips: Sequence[Any]) -> int | None:
    """The axis along which all chips can have a part; None if there is none."""
    return next((i for i, n in enumerate(shape) if n % len(chips) == 0), None)


def _gathered(
    makes: Sequence[Any],
    tensors: Sequence[Sequence[Any]],
    matrices: Sequence[Any],
    chips: list[Any],
    name: str,
    record: Record,
) -> None:
    """What gathers the leaves that can be cut, and quantizes some of them first."""
    devices, converters_, kinds, early = tuple(chips), [], [], []
    for make, group, matrix in zip(makes, tensors, matrices, strict=True):
        if any(tensor.sharding.is_fully_replicated for tensor in group):
            continue
        if matrix is None:
            converters_.append(make)
            kinds.append([gathering.kind_of(x.shape, x.dtype, x.sharding, devices) for x in group])
        else:
            early.append(matrix)
            converters_.append(shard_quantizing.joining(matrix))
            kinds.append(matrix.quantized)
    if early:
        _quantized(tuple(early), devices, name, record)
    if kinds:
        _gathered_kinds(converters_, kinds, devices, name, record)


def _quantized(matrices: Any, devices: Any, name: str, record: Record) -> None:
    """What finds the largest elements of sharded matrices, and what quantizes each part."""
    parts = [_stacked(matrix.kind, devices) for matrix in matrices]
    everywhere = NamedSharding(gathering.mesh_of(devices), PartitionSpec())
    with outside_meshes():
        program: Any = shard_quantizing.largest_program.__wrapped__(matrices, devices)
        record.add("gather", f"find the largest of {name}", program.lower(parts).program)
        largest = [
            AbstractArray(matrix.largest_shape, np.float32, everywhere) for matrix in matrices
        ]
        program = shard_quantizing.quantize_program.__wrapped__(matrices, devices)
        record.add("gather", f"quantize {name}", program.lower(parts, largest).program)
    makes = [shard_quantizing.of_all(matrix.axis) for matrix in matrices]
    kinds = [[matrix.largest] for matrix in matrices]
    _gathered_kinds(makes, kinds, devices, f"largest of {name}", record)


def _gathered_kinds(
    makes: Sequence[Any],
    groups: Sequence[Sequence[gathering.Kind]],
    devices: Any,
    name: str,
    record: Record,
) -> None:
    """What packs small parts, and what joins all parts."""
    kinds = tuple(kind for group in groups for kind in group)
    small = tuple(kind for kind in kinds if kind.small)
    shapes = [(kind.part, kind.dtype) for kind in kinds if not kind.small]
    if small:
        with outside_meshes():
            lowered: Any = gathering.pack_program.__wrapped__(small, devices)
            stacked = [_stacked(kind, devices) for kind in small]
            record.add("gather", f"pack {name}", lowered.lower(stacked).program)
        sizes: dict[Any, int] = {}
        for kind in small:
            sizes[kind.dtype] = sizes.get(kind.dtype, 0) + math.prod(kind.part)
        shapes += [((size,), dtype) for dtype, size in sizes.items()]
    everywhere = NamedSharding(gathering.mesh_of(devices), PartitionSpec())
    sent = [
        [AbstractArray(shape, dtype, everywhere) for _ in senders]
        for (shape, dtype), senders in zip(shapes, gathering.senders_of(kinds), strict=True)
    ]
    lengths = tuple(map(len, groups))
    with outside_meshes():
        lowered = gathering.join_program.__wrapped__(tuple(makes), lengths, kinds, devices)
        record.add("gather", name, lowered.lower(sent).program)


def _stacked(kind: gathering.Kind, devices: Any) -> AbstractArray:
    """All devices' parts of a tensor, as one array."""
    sharding = NamedSharding(gathering.mesh_of(devices), PartitionSpec("all"))
    shape = (len(devices) * kind.part[0], *kind.part[1:])
    return AbstractArray(shape, kind.dtype, sharding)


def _lowered(makes: Sequence[Any], tensors: Any, shardings: Sequence[Any]) -> Any:
    # Without the cache of `program`, because `jax.jit` is replaced here.
    program = converters.program.__wrapped__(tuple(makes), tuple(shardings))
    return program.lower(tensors).program


def _tied_head(specs: Any, chip: Any, record: Record) -> None:
    head = tied.TiedHead(specs)
    if head.path is None or not record.wants("tied_head"):
        return
    spec = specs[head.path]
    matrix = AbstractArray(spec.shape, spec.dtype, SingleDeviceSharding(chip))
    lowered = tied.equal_on_devices.lower(matrix, matrix, spec.dtype)
    record.add("tied_head", "x".join(map(str, spec.shape)), lowered)
