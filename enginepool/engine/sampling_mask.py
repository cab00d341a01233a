"""Finds the ids that the sampler's filters leave, as a part of the programs that sample.

Reaches into upstream's sampler: its top-k and top-p masks are called.

What breaks: Upstream does not return the ids among which an id was sampled. A trainer computes
probabilities over the whole vocabulary. Its importance ratios are then wrong for samples of top-p
or top-k.
Why: Upstream's sampler draws from the filtered logits and drops them.
Remove when: Upstream's sampler returns what its filters left.

The filters are applied in the order of patches/top_p_order.py.
"""

from __future__ import annotations

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


def find_kept(logprobs: jax.Array, params: Any, ids: jax.Array, width: int) -> jax.Array:
    """Inside a program, of replicated arrays: the kept ids of every row. `kept_of` reads a row.

    Args:
        logprobs: By row, by id: the log-probabilities that are reported.
        params: An object with `top_ks`, `top_ps` and `min_ps`, by row.
        ids: By row: the sampled id. It is always kept. If a sum of probabilities equals `top_p`,
            rounding may decide differently here than in the sampler.
        width: How many ids there is room for.
    """
    rows = jnp.arange(len(ids))
    logprobs = logprobs.astype(jnp.float32)
    left = jnp.where(logprobs > NEVER, logprobs, -jnp.inf)
    left = _filtered(left, params)
    least = jnp.max(left, axis=1) + jnp.log(params.min_ps)
    kept = (left > -jnp.inf) & (left >= least[:, None]) & (params.top_ks > 1)[:, None]
    kept = kept.at[rows, ids].set(True)
    log_mass = jax.nn.logsumexp(jnp.where(kept, logprobs, -jnp.inf), axis=1)
    own = logprobs[rows, ids] - log_mass
    count = jnp.cumsum(kept, axis=1, dtype=jnp.int32)
    place = jnp.arange(1, width + 1)
    listed = jax.vmap(lambda one: jnp.searchsorted(one, place))(count)
    head = jnp.stack([count[:, -1], jax.lax.bitcast_convert_type(own, jnp.int32)], axis=1)
    return jnp.concatenate([head, listed.astype(jnp.int32)], axis=1)


def _filtered(left: jax.Array, params: Any) -> jax.Array:
    """What top-k and top-p leave. Each of the two filters reads all rows 32 times. So each runs
    only if a row uses it."""
    some_k = ((params.top_ks > 1) & (params.top_ks < left.shape[1])).any()
    some_p = (params.top_ps < 1).any()
    top_ps = jnp.where(params.top_ps >= 1, _ALL, params.top_ps)
    left = jax.lax.cond(
        some_k, lambda one: topk_mask(one, params.top_ks, -jnp.inf), lambda one: one, left
    )
    return jax.lax.cond(some_p, lambda one: topp_mask(one, top_ps, -jnp.inf), lambda one: one, left)


def no_kept(rows: int, width: int) -> jax.Array:
    """Inside a program: the result of `find_kept` where no row asks for it."""
    return jnp.zeros((rows, _HEAD + width), jnp.int32)


def kept_of(row: np.ndarray, vocab_size: int) -> Kept:
    """Read one row of what `find_kept` has returned."""
    count, width = int(row[0]), len(row) - _HEAD
    logprob = min(0.0, float(row[1:2].view(np.float32)[0]))
    if count == vocab_size:
        return Kept(0, row[:0], logprob)
    listed = row[_HEAD : _HEAD + count] if count <= width else row[:0]
    return Kept(count, listed.copy(), logprob)
