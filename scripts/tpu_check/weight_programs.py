"""The programs that a change of weights runs on an engine's chip, for every shape of leaf.

Upstream's conversion of a checkpoint's tensors is one program here. A swap runs it operation by
operation, so that this shows that it compiles, and not what it holds in between.

Imports sgl_jax: import it only after the patches are applied.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from enginepool.doctor.ahead_of_time.record import Record
from enginepool.doctor.ahead_of_time.stand_ins import AbstractArray
from enginepool.weights import fingerprint, placement, tied


def weight_programs(scheduler: Any, chips: list[Any], record: Record) -> None:
    """Compile fingerprints, casts, copies, gathering and the conversion of a checkpoint."""
    mapping = scheduler.hugging_face
    seen: set[Any] = set()
    for path, spec in scheduler.leaves.specs.items():
        shape = (spec.shape, spec.dtype)
        size = f"{path.rpartition('layers.0.')[2]} {'x'.join(map(str, spec.shape))}"
        if shape not in seen:
            seen.add(shape)
            _of_shape(spec, chips, size, record)
        kind = mapping.kind(path) if path in mapping.names else None
        if kind is not None and kind not in seen and not mapping.keeps(path):
            seen.add(kind)
            _conversion(mapping, path, spec, size, record)
    _tied_head(scheduler.leaves.specs, chips[0], record)


def _of_shape(spec: Any, chips: list[Any], size: str, record: Record) -> None:
    on_chip = SingleDeviceSharding(chips[0])
    leaf = AbstractArray(spec.shape, spec.dtype, on_chip)
    wide = AbstractArray(spec.shape, jnp.float32, on_chip)
    if record.wants("fingerprint"):
        record.add("fingerprint", size, fingerprint.weighted_sum.lower(leaf))
    if record.wants("cast"):
        cast: Any = jax.jit(lambda array: array.astype(spec.dtype))
        record.add("cast", size, cast.lower(wide).program)
    if record.wants("copy"):
        copy: Any = jax.jit(lambda array: jnp.array(array, copy=True))
        record.add("copy", size, copy.lower(leaf).program)
    if record.wants("gather") and any(n % len(chips) == 0 for n in spec.shape):
        _gathered(spec, chips, spec.dtype, size, record)
        _gathered(spec, chips, jnp.float32, size, record)


def _gathered(spec: Any, chips: list[Any], dtype: Any, size: str, record: Record) -> None:
    """From a trainer that has the leaf in parts, in this dtype, on all chips."""
    axis = next(i for i, n in enumerate(spec.shape) if n % len(chips) == 0)
    mesh = Mesh(np.array(chips), ("all",))
    cut = NamedSharding(mesh, PartitionSpec(*[None] * axis, "all"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    gather = placement.gather_program.__wrapped__(everywhere, np.dtype(spec.dtype))
    with jax.set_mesh(mesh):
        lowered = gather.lower(AbstractArray(spec.shape, dtype, cut))
    record.add("gather", size, lowered.program)


def _conversion(mapping: Any, path: str, spec: Any, size: str, record: Record) -> None:
    """Upstream's transposes, reshapes and stacking, from tensors that lie on the chip."""
    if not record.wants("convert"):
        return
    shape = mapping.source_shape(path)
    tensor = jax.ShapeDtypeStruct(shape, spec.dtype, sharding=_replicated(spec))
    tensors = dict.fromkeys(mapping.names[path], tensor)

    def lower(trace: Any, arrays: Any) -> Any:
        convert: Any = jax.jit(trace, out_shardings=spec.sharding)
        return convert.lower(arrays).program

    record.add("convert", size, mapping.traced(path, tensors, lower))


def _replicated(spec: Any) -> NamedSharding:
    return NamedSharding(spec.sharding.mesh, PartitionSpec())


def _tied_head(specs: Any, chip: Any, record: Record) -> None:
    head = tied.TiedHead(specs)
    if head.path is None or not record.wants("tied_head"):
        return
    spec = specs[head.path]
    matrix = AbstractArray(spec.shape, spec.dtype, SingleDeviceSharding(chip))
    lowered = tied.equal_on_devices.lower(matrix, matrix, spec.dtype)
    record.add("tied_head", "x".join(map(str, spec.shape)), lowered)
