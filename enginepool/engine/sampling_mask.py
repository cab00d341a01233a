"""Top-k, top-p and min-p, and the ids that they leave, as parts of the programs that sample.

Reaches into upstream's sampler: its top-k and top-p masks are called.

What breaks: Upstream does not return the ids among which an id was sampled. A trainer computes
probabilities over the whole vocabulary. Its importance ratios are then wrong for samples of top-p
or top-k. And its masks read the logits of all rows 64 times, even if no row has top-k or top-p.
Why: Upstream's sampler draws from the filtered logits and drops them.
Remove when: Upstream's sampler returns what its filters left, and skips filters that no row uses.

The filters are applied in the order of patches/top_p_order.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sgl_jax.srt.layers.binary_search import topk_mask, topp_mask

from enginepool.dispatch.sampling_mask import Kept

# Lower than the log-probability of any id that may be sampled.
NEVER = -1e30
# More than any sum of probabilities.
_ALL = 2.0
# Numbers before the ids of a row: how many ids there are, and the bits of the log-probability.
_HEAD = 2


def least_kept(logits: jax.Array, params: Any) -> jax.Array:
    """Inside a program, of replicated arrays: by row, the least logit that the filters leave.
    Infinity for a greedy row.

    Each of the two masks reads all rows 32 times. So each runs only if a row uses it.

    Args:
        logits: By row, by id: after the temperature, in float32. Log-probabilities do as well.
        params: An object with `top_ks`, `top_ps` and `min_ps`, by row.
    """
    by_k = (params.top_ks > 1) & (params.top_ks < logits.shape[1])
    top_ps = jnp.where(params.top_ps >= 1, _ALL, params.top_ps)
    least = _least(by_k.any(), lambda one: topk_mask(one, params.top_ks, -jnp.inf), logits)
    left = at_least(logits, least)
    some_p = (params.top_ps < 1).any()
    least_by_p = _least(some_p, lambda one: topp_mask(one, top_ps, -jnp.inf), left)
    least_by_min_p = jnp.max(logits, axis=1) + jnp.log(params.min_ps)
    least = jnp.maximum(jnp.maximum(least, least_by_p), least_by_min_p)
    return jnp.where(params.top_ks > 1, least, jnp.inf)


def _least(used: jax.Array, mask: Callable[[jax.Array], jax.Array], logits: jax.Array) -> jax.Array:
    """By row: the least logit that this mask leaves. Without the mask minus infinity."""

    def masked(logits: jax.Array) -> jax.Array:
        left = mask(logits)
        return jnp.min(jnp.where(left > -jnp.inf, left, jnp.inf), axis=1)

    def nothing(logits: jax.Array) -> jax.Array:
        return jnp.full(len(logits), -jnp.inf)

    # A number a row leaves the branch. Whole rows would be copied.
    return jax.lax.cond(used, masked, nothing, logits)


def at_least(logits: jax.Array, least: jax.Array) -> jax.Array:
    """Inside a program: the logits, minus infinity where they are below their row's least."""
    return jnp.where(logits >= least[:, None], logits, -jnp.inf)


def find_kept(logprobs: jax.Array, params: Any, ids: jax.Array, width: int) -> jax.Array:
    """Inside a program, of replicated arrays: the kept ids of every row, from log-probabilities.

    If a sum of probabilities equals `top_p`, rounding may decide differently here than in the
    sampler. See `least_kept` and `list_kept` for the arguments.
    """
    logprobs = logprobs.astype(jnp.float32)
    left = jnp.where(logprobs > NEVER, logprobs, -jnp.inf)
    left = at_least(left, least_kept(left, params))
    return list_kept(left > -jnp.inf, logprobs, ids, width)


def list_kept(kept: jax.Array, logprobs: jax.Array, ids: jax.Array, width: int) -> jax.Array:
    """Inside a program, of replicated arrays: the kept ids of every row. `kept_of` reads a row.

    Args:
        kept: By row, by id: whether the filters leave it.
        logprobs: By row, by id: the log-probabilities that are reported.
        ids: By row: the sampled id. It is always kept.
        width: How many ids there is room for.
    """
    rows = jnp.arange(len(ids))
    kept = kept.at[rows, ids].set(True)
    log_mass = jax.nn.logsumexp(jnp.where(kept, logprobs, -jnp.inf), axis=1)
    own = logprobs[rows, ids] - log_mass
    count = jnp.cumsum(kept, axis=1, dtype=jnp.int32)
    place = jnp.arange(1, width + 1)
    listed = jax.vmap(lambda one: jnp.searchsorted(one, place))(count)
    head = jnp.stack([count[:, -1], jax.lax.bitcast_convert_type(own, jnp.int32)], axis=1)
    return jnp.concatenate([head, listed.astype(jnp.int32)], axis=1)


def no_kept(rows: int, width: int) -> jax.Array:
    """Inside a program: the result of `list_kept` where no row asks for it."""
    return jnp.zeros((rows, _HEAD + width), jnp.int32)


def kept_of(row: np.ndarray, vocab_size: int) -> Kept:
    """Read one row of what `list_kept` has returned."""
    count, width = int(row[0]), len(row) - _HEAD
    logprob = min(0.0, float(row[1:2].view(np.float32)[0]))
    if count == vocab_size:
        return Kept(0, row[:0], logprob)
    listed = row[_HEAD : _HEAD + count] if count <= width else row[:0]
    return Kept(count, listed.copy(), logprob)
