"""top-k and top-p apply to the distribution after the temperature.

What breaks: With a temperature other than 1, top_p keeps the wrong tokens. With temperature 4,
.7/.3 becomes .55/.45, but top_p .65 then draws the first alone.

Why: The masking path applies top-k and top-p to the raw logits, and divides by the temperature
afterwards. The sorting path (`use_sort_for_toppk_minp`) applies the temperature first, but measures
top-p before top-k. The two disagree.

What we change: The order is temperature, top-k, top-p, min-p, as in Hugging Face transformers and
vLLM. Each is applied to what the one before left, renormalised. The masking path gets divided
logits and temperatures of one. The sorting path gets probabilities after top-k. A top_p of 1 keeps
every token (upstream drops a tail that is lost in rounding). Tokens that tie with the last kept one
are kept, as in transformers. The sorting path keeps exactly k.

Remove when: Every supported upstream has https://github.com/sgl-project/sglang-jax/pull/1563. Such
an upstream measures top-p before top-k, as SGLang does, and the probe says that it needs no patch.
https://github.com/sgl-project/sglang-jax/pull/1638 removes the sorting path.
"""

from types import SimpleNamespace

import numpy as np

from patches._lookup import module, with_globals
from patches._patch import Patch, Target

_MODULE = "sgl_jax.srt.layers.sampler"
# More than any sum of probabilities.
_ALL = 2.0


def _is_needed(by_mask, _) -> bool:
    """Sample in NumPy up to the draw, and count the tokens that are left."""
    drawn = []

    def draw(operands):
        drawn.append(np.asarray(operands[0]))
        return np.zeros((1, 1), np.int32)

    sample = with_globals(
        by_mask,
        jnp=np,
        lax=SimpleNamespace(cond=lambda test, yes, no, operands: (yes if test else no)(operands)),
        topk_mask=lambda logits, top_ks, replace_val: logits,
        topp_mask=_topp_mask,
        multinomial=draw,
        multinomial_with_seed=draw,
    )
    temperature, top_p = 4.0, 0.65
    logits = np.log(np.array([[0.7, 0.3]], np.float32))
    sample(
        (
            logits,
            _softmax(logits / temperature),
            np.full(1, 2, np.int32),
            np.full(1, top_p, np.float32),
            np.zeros(1, np.float32),
            np.zeros(1, np.int32),
            np.full((1, 1), temperature, np.float32),
            None,
            False,
            None,
        )
    )
    return int((_softmax(drawn[0]) > 1e-6).sum()) != 2


def _softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _topp_mask(logits, top_ps, replace_val):
    """What upstream's function of this name does, for rows in descending order."""
    probs = _softmax(logits)
    before = np.cumsum(probs, axis=-1) - probs
    return np.where(before < top_ps.reshape(-1, 1), logits, replace_val)


def _replace_by_mask(original):
    def sample(args):
        logits, probs, top_ks, top_ps, min_ps, positions, temperatures, *rest = args
        jnp = module("jax.numpy")
        logits = jnp.divide(logits.astype(jnp.float32), temperatures.astype(jnp.float32))
        top_ps = jnp.where(top_ps >= 1, _ALL, top_ps)
        ones = jnp.ones_like(temperatures)
        return original((logits, probs, top_ks, top_ps, min_ps, positions, ones, *rest))

    return sample


def _replace_by_sort(original):
    def sample(args):
        logits, probs, top_ks, top_ps, *rest = args
        jnp = module("jax.numpy")
        probs = module(_MODULE).topk_mask(probs.astype(jnp.float32), top_ks, replace_val=0.0)
        probs = probs / jnp.sum(probs, axis=-1, keepdims=True)
        top_ps = jnp.where(top_ps >= 1, _ALL, top_ps)
        return original((logits, probs, top_ks, top_ps, *rest))

    return sample


_NAME = "top_k_top_p_min_p_sampling_from_probs_jax"
PATCH = Patch(
    name="top_p_order",
    issue="https://github.com/sgl-project/sglang-jax/pull/1563",
    replaced=(
        Target(_MODULE, f"{_NAME}_with_mask", _replace_by_mask, ("args",)),
        Target(_MODULE, f"{_NAME}_with_sort", _replace_by_sort, ("args",), optional=True),
    ),
    probe=_is_needed,
)
