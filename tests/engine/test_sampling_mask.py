"""The kept ids of a vocabulary that is larger than a mask may be."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginepool.engine.sampling_mask import find_kept, kept_of


def test_the_bound() -> None:
    """As many ids as fit, and one more."""
    vocab_size, counts = 2000, [512, 513, 1999, 2000, 1]
    law = np.log(np.random.default_rng(0).dirichlet(np.ones(vocab_size), 5)).astype(np.float32)
    params = SimpleNamespace(
        top_ks=jnp.array(counts), top_ps=jnp.ones(5), min_ps=jnp.zeros(5, jnp.float32)
    )
    find = jax.jit(lambda law, ids: find_kept(law, params, ids, 512))
    for row, count, one in zip(find(law, law.argmax(axis=1)), counts, law, strict=True):
        kept = kept_of(np.asarray(row), vocab_size)
        best = np.argsort(-one)[:count]
        assert kept.count == count % vocab_size
        assert kept.ids.tolist() == (sorted(best) if count <= 512 else [])
        assert kept.logprob == pytest.approx(one.max() - np.logaddexp.reduce(one[best]), abs=1e-4)
