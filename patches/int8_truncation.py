"""int8 weights and activations are rounded to the nearest integer, not towards zero.

What breaks: int8 weights are smaller than the weights that they replace: by half a step on average,
and by a whole step at most. Every product is too small by a percent or two, and its error is twice
what int8 needs. The same holds for activations in int8.

Why: `quantize_tensor` and `quantize_tensor_simple` cast a quotient to an integer, which drops its
fraction. A cast to fp8 rounds.

What we change: For an integer dtype, the quotient is rounded to the nearest integer before the
cast.

Remove when: Upstream rounds.
"""

import functools

import numpy as np

from patches._lookup import ModuleProxy, with_globals
from patches._patch import Patch, Target

_MODULE = "sgl_jax.srt.utils.quantization.quantization_utils"
# Modules that hold the functions under their own names.
_WEIGHTS = ("layers.linear", "layers.moe", "layers.fused_moe")
_ACTIVATIONS = ("layers.moe", "kernels.quantized_matmul.kernel", "kernels.gmm.megablox_gmm_backend")


def _is_needed(original, *rest) -> bool:
    """Quantize two numbers with NumPy in the place of JAX."""
    numpy = ModuleProxy(
        np,
        max=lambda array, axis, keepdims: np.max(array, axis=tuple(axis), keepdims=keepdims),
        squeeze=lambda array, axis: np.squeeze(array, tuple(axis)),
    )
    given = np.array([[127.0, 126.9]], np.float32)
    quantized, _ = with_globals(original, jnp=numpy)(np.int8, given, axis=1)
    return int(quantized[0, 1]) != 127


def _replace(original, place):
    """
    Args:
        place: Where `dtype` is among the positional arguments.
    """
    jnp = original.__globals__["jnp"]
    clip = lambda value, low, high: jnp.round(jnp.clip(value, low, high))  # noqa: E731
    rounding = with_globals(original, jnp=ModuleProxy(jnp, clip=clip))

    @functools.wraps(original)
    def quantize(*args, **kwargs):
        dtype = kwargs["dtype"] if "dtype" in kwargs else args[place]
        chosen = rounding if np.issubdtype(np.dtype(dtype), np.integer) else original
        return chosen(*args, **kwargs)

    return quantize


_OF_WEIGHTS = (
    "quantize_tensor",
    functools.partial(_replace, place=0),
    ("dtype", "tensor", "axis", "block_size", "pad_tensor"),
)
_OF_ACTIVATIONS = (
    "quantize_tensor_simple",
    functools.partial(_replace, place=1),
    ("x", "dtype", "dim", "out_dtype"),
)

PATCH = Patch(
    name="int8_truncation",
    issue="not reported",
    replaced=(
        Target(_MODULE, *_OF_WEIGHTS),
        Target(_MODULE, *_OF_ACTIVATIONS),
        *(Target(f"sgl_jax.srt.{holder}", *_OF_WEIGHTS) for holder in _WEIGHTS),
        *(Target(f"sgl_jax.srt.{holder}", *_OF_ACTIVATIONS) for holder in _ACTIVATIONS),
    ),
    probe=_is_needed,
)
