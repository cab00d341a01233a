"""Llama 3's scaled rotary frequencies are used.

What breaks: The scaling of `rope_type` "llama3" does nothing. Llama 3.1, 3.2, 3.3 and models
trained from them have it.

Why: `Llama3RotaryEmbedding` overrides a method that computes frequencies. The forward reads
`_inv_freq_np`, which the base class's constructor fills without that method.

What we change: The constructor scales `_inv_freq_np`. A wave that fits less than `low_freq_factor`
times into the original context becomes `factor` times as long. One that fits more than
`high_freq_factor` times stays as it is. Between the two, frequencies are interpolated linearly by
how often the wave fits (Llama 3.1's model card and reference code).

Remove when: Upstream's forward uses the scaled frequencies.
"""

import math

import numpy as np

from patches._lookup import ROTARY_PARAMETERS, constructed, module
from patches._patch import Patch, Target

_MODULE = "sgl_jax.srt.layers.embeddings"


def _is_needed(original) -> bool:
    """Construct an embedding whose waves must all be scaled. The constructor uses NumPy only."""
    args = (8, 8, 64, 10000, True, np.float32, 8.0, 1000.0, 4000.0, 64)
    embedding = constructed(module(_MODULE).Llama3RotaryEmbedding, original, *args)
    plain = 10000.0 ** (-np.arange(0, 8, 2) / 8)
    return bool(np.allclose(embedding._inv_freq_np, plain))


def _replace(original):
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self._inv_freq_np = scaled(
            self._inv_freq_np,
            self.scaling_factor,
            self.low_freq_factor,
            self.high_freq_factor,
            self.orig_max_position,
        )

    return __init__


def scaled(plain, factor, low, high, original_context):
    """Llama 3.1's frequencies, from those without scaling."""
    fits = original_context * plain / (2 * math.pi)
    kept = np.clip((fits - low) / (high - low), 0, 1) if high != low else fits > high
    return (plain * (kept + (1 - kept) / factor)).astype(plain.dtype)


PATCH = Patch(
    name="llama3_rotary",
    issue="not reported",
    replaced=(
        Target(
            _MODULE,
            "Llama3RotaryEmbedding.__init__",
            _replace,
            (
                *ROTARY_PARAMETERS,
                "scaling_factor",
                "low_freq_factor",
                "high_freq_factor",
                "orig_max_position",
            ),
        ),
    ),
    probe=_is_needed,
)
