"""Arrays of every kind that a trainer may have: NumPy, JAX, torch (by protocol)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from numpy.lib.array_utils import byte_bounds

from enginepool.errors import InvalidWeights
from enginepool.weights.addressable import addressable

Array = np.ndarray | jax.Array

_USUAL = {np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)}  # JAX never converts them


# A trainer's `with jax.set_mesh(mesh)` holds for its thread. JAX refuses programs over other
# devices there, so programs on engines' devices run outside the mesh. An update as a whole runs
# inside it, because the trainer's iterator may need the mesh.
_NO_MESH = Mesh(np.empty((), dtype=object), ())


def outside_meshes() -> Any:
    """A context in which no mesh is set."""
    return jax.set_mesh(_NO_MESH)


def lost(arrays: Mapping[str, Any]) -> list[str]:
    """The paths of arrays that cannot be read: dropped, deleted or donated."""
    return [
        path
        for path, array in arrays.items()
        if not isinstance(array, jax.Array) or array.is_deleted()
    ]


def is_array(value: Any) -> bool:
    """Whether `as_array` takes this value."""
    return isinstance(value, np.ndarray | jax.Array) or is_torch(value)


def is_torch(value: Any) -> TypeGuard[Any]:
    torch = sys.modules.get("torch")  # whoever holds a tensor has imported it
    return torch is not None and isinstance(value, torch.Tensor)


def as_array(name: str, value: Any) -> Array:
    """NumPy and JAX arrays unchanged, a global array as its local copy, and a torch tensor as a
    NumPy array. A torch tensor in host memory is not copied.

    Raises:
        InvalidWeights: The value has another type, or its numbers cannot be read. This holds for a
            JAX array that is deleted, donated, traced, unreduced or on other processes' devices,
            for a masked array, and for a tensor that torch cannot convert.
    """
    if isinstance(value, Tracer):
        raise InvalidWeights(
            f"{name}: this JAX array has no value while it is traced; call update_weights outside "
            "jax.jit and the like",
            names=[name],
        )
    if isinstance(value, jax.Array):
        if value.is_deleted():
            raise InvalidWeights(
                f"{name}: this JAX array was deleted or donated before update_weights could "
                "read it",
                names=[name],
            )
        spec = getattr(value.sharding, "spec", None)
        if getattr(spec, "unreduced", None):
            raise InvalidWeights(
                f"{name}: this JAX array is unreduced: each device has a partial sum ({spec}); "
                "sum it with jax.sharding.reshard before update_weights",
                names=[name],
            )
        return addressable(name, value)
    if isinstance(value, np.ndarray):
        if np.ma.is_masked(value):
            raise InvalidWeights(
                f"{name}: this array has masked elements, and a weight cannot be masked; fill them "
                "(.filled(…)) first",
                names=[name],
            )
        return np.asarray(value)  # JAX refuses some subclasses
    if is_torch(value):
        try:
            return _from_torch(value)
        except Exception as error:  # whatever torch raises: sparse, quantized, on no device
            raise InvalidWeights(
                f"{name}: this torch tensor cannot become a NumPy array: {error}", names=[name]
            ) from error
    raise InvalidWeights(
        f"{name}: expected a NumPy, JAX or torch array, not {type(value).__name__}", names=[name]
    )


def _from_torch(tensor: Any) -> np.ndarray:
    torch = sys.modules["torch"]
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:  # torch cannot convert it: NumPy has no bfloat16
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def convertible(source: Any, target: Any) -> bool:
    """Whether weights of dtype `source` may be cast to the leaf's dtype `target`. Floats of at
    least 16 bits may be cast to each other. Any other dtype must already be the leaf's."""
    if isinstance(source, np.dtype):
        source = source.newbyteorder("=")
    return source == target or (_plain_float(source) and _plain_float(target))


def jax_dtype(dtype: Any) -> np.dtype:
    """The dtype that JAX converts this dtype to: in native byte order, 64 bits only if enabled."""
    dtype = np.dtype(dtype)
    if dtype in _USUAL:
        return dtype
    dtype = dtype.newbyteorder("=")
    return jax.dtypes.canonicalize_dtype(np.float64 if dtype == np.longdouble else dtype)


def for_jax(array: np.ndarray) -> np.ndarray:
    """The array in the dtype that JAX would convert it to. It is copied only if that differs."""
    return array.astype(jax_dtype(array.dtype), copy=False)


def _plain_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize >= 2


def same_buffer(array: jax.Array, source: Array) -> bool:
    """Whether `array` and a JAX source share a buffer, so that deleting one deletes the other.
    False for a NumPy source: anybody may write to it, so weights never share its memory. Does not
    wait for the arrays."""
    if isinstance(source, np.ndarray):
        return False
    theirs = {_place(shard) for shard in source.addressable_shards}
    return any(_place(shard) in theirs for shard in array.addressable_shards)


def lies_in(array: jax.Array, memory: np.ndarray) -> bool:
    """Whether `array` reads this memory in place, as the CPU platform may. Does not wait for the
    array."""
    if any(device.platform != "cpu" for device in array.devices()):
        return False
    begin, end = byte_bounds(memory)
    return any(begin <= _place(shard)[1] < end for shard in array.addressable_shards)


def _place(shard: Any) -> tuple[int, int]:
    return shard.device.id, shard.data.unsafe_buffer_pointer()
