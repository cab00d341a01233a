"""Rotary frequencies are not rounded to the model's dtype.

What breaks: In bfloat16, sglang-jax 0.0.3rc99 computes rotary angles from frequencies with eight
significant bits. At position 1000 an angle is off by up to two radians.

Why: The forward casts the frequencies to the embedding's `dtype` before it multiplies them by the
positions. Later versions cast the cosines and sines instead.

What we change: The embedding's `dtype` is float32. Upstream casts cosines and sines to the dtype of
queries and keys anyway.

Remove when: 0.0.3rc99 is not supported any more.
"""

import inspect
from types import SimpleNamespace

import numpy as np

from patches._lookup import ROTARY_PARAMETERS, constructed, module, with_globals
from patches._patch import Patch, Target

_MODULE = "sgl_jax.srt.layers.embeddings"
_HALF = np.dtype(np.float16)


class _Cast(Exception):
    """Ends a forward where it makes an array of the frequencies."""


def _is_needed(original) -> bool:
    """Run the forward up to the frequencies. It computes nothing before."""
    rotary = module(_MODULE).RotaryEmbedding
    embedding = constructed(rotary, original, 8, 8, 64, 10000, True, _HALF)

    def asarray(array, dtype=None):
        raise _Cast(dtype)

    function = vars(rotary).get("_compute_cos_sin")
    args = (np.zeros(1, np.int32),) + (() if function else (None, None))
    forward = inspect.unwrap(function or rotary.__call__)
    try:
        with_globals(forward, jnp=SimpleNamespace(asarray=asarray, float32=np.float32))(
            embedding, *args
        )
    except _Cast as cast:
        return cast.args[0] == _HALF
    return False


def _replace(original):
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.dtype = np.dtype(np.float32)

    return __init__


PATCH = Patch(
    name="rotary_precision",
    issue="not reported",
    replaced=(
        Target(
            _MODULE,
            "RotaryEmbedding.__init__",
            _replace,
            (*ROTARY_PARAMETERS, "mesh"),
        ),
    ),
    probe=_is_needed,
)
