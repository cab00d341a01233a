"""min_p filters logits by the ratio of probabilities.

What breaks: With min_p the sampler draws from the wrong distribution: .4/.3/.15/.1/.05 with
min_p .5 is drawn .2 each.

Why: `_apply_min_p_filter` treats logits as probabilities: it compares them with `min_p * max`
and sets what it masks to 0, which is a likely logit.

What we change: For logits: tokens with `p < min_p * p_max` get the value that the module's other
masks use. Their logit is below `max + log(min_p)`. For probabilities upstream's function is right,
and it is called.

Remove when: Every supported upstream has https://github.com/sgl-project/sglang-jax/pull/1563.
"""

import numpy as np

from patches._lookup import module, with_globals
from patches._patch import Patch, Target

# What upstream's top-k and top-p masks put in.
_MASKED = -1e12


def _is_needed(original) -> bool:
    function = with_globals(original, jnp=np)
    logits = np.log(np.array([[0.4, 0.3, 0.15, 0.1, 0.05]], np.float32))
    operands = (logits, np.full(1, 0.5, np.float32))
    try:
        filtered = function((*operands, False))
    except ValueError:
        # https://github.com/sgl-project/sglang-jax/pull/1638 takes the third operand away.
        filtered = function(operands)
    kept = np.exp(np.asarray(filtered)) > 1e-6
    return kept.tolist() != [[True, True, False, False, False]]


def _replace(original):
    def apply_min_p_filter(operands):
        inputs, min_ps, use_probs = operands
        if use_probs:
            return original(operands)
        jnp = module("jax.numpy")
        threshold = jnp.max(inputs, axis=1) + jnp.log(min_ps)
        return jnp.where(inputs < threshold.reshape(-1, 1), _MASKED, inputs)

    return apply_min_p_filter


PATCH = Patch(
    name="min_p",
    issue="https://github.com/sgl-project/sglang-jax/pull/1563",
    replaced=(
        Target("sgl_jax.srt.layers.sampler", "_apply_min_p_filter", _replace, ("operands",)),
    ),
    probe=_is_needed,
)
