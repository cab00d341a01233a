"""Arrays of every kind that a trainer may have: NumPy, JAX, torch (by protocol)."""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.lib.array_utils import byte_bounds

from enginepool.errors import InvalidWeights

Array = np.ndarray | jax.Array


def is_array(value: Any) -> bool:
    """Whether this is something that `as_array` takes."""
    return isinstance(value, np.ndarray | jax.Array) or is_torch(value)


def is_torch(value: Any) -> TypeGuard[Any]:
    torch = sys.modules.get("torch")  # whoever holds a tensor has imported it
    return torch is not None and isinstance(value, torch.Tensor)


def as_array(name: str, value: Any) -> Array:
    """NumPy and JAX arrays as they are; a torch tensor as a NumPy array, without a copy where it
    lies in host memory.

    Raises:
        InvalidWeights: Neither of the three, or a JAX array that was deleted or donated.
    """
    if isinstance(value, jax.Array):
        if value.is_deleted():
            raise InvalidWeights(
                f"{name}: this JAX array was deleted or donated before update_weights could "
                "read it",
                names=[name],
            )
        return value
    if isinstance(value, np.ndarray):
        return value
    if is_torch(value):
        return _from_torch(value)
    raise InvalidWeights(
        f"{name}: expected a NumPy, JAX or torch array, not {type(value).__name__}", names=[name]
    )


def _from_torch(tensor: Any) -> np.ndarray:
    torch = sys.modules["torch"]
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:  # NumPy has none of its own, so torch refuses
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def convertible(source: Any, target: Any) -> bool:
    """Whether weights of dtype `source` may be cast to the leaf's dtype `target`: between floats
    of at least 16 bits; anything else only as it is."""
    return source == target or (_plain_float(source) and _plain_float(target))


def _plain_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize >= 2


def same_buffer(array: jax.Array, source: Array) -> bool:
    """Whether `array` and a JAX source share a buffer, so that they go together. Weights never
    share NumPy's memory, which anybody may write to. Does not wait for either."""
    if isinstance(source, np.ndarray):
        return False
    theirs = {_place(shard) for shard in source.addressable_shards}
    return any(_place(shard) in theirs for shard in array.addressable_shards)


def lies_in(array: jax.Array, memory: np.ndarray) -> bool:
    """Whether `array` reads this memory, as it may on the CPU platform. Does not wait for it."""
    if any(device.platform != "cpu" for device in array.devices()):
        return False
    begin, end = byte_bounds(memory)
    return any(begin <= _place(shard)[1] < end for shard in array.addressable_shards)


def _place(shard: Any) -> tuple[int, int]:
    return shard.device.id, shard.data.unsafe_buffer_pointer()
