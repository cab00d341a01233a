"""A request's tokens and log-probabilities do not depend on the other requests of its batch.

What breaks: A request with top_k=1 and a temperature gets log-probabilities of temperature 1 if all
others are greedy, and of its own temperature otherwise. In a batch that is not all greedy, a greedy
request draws among tokens that tie for the best. With bfloat16 logits that happens often. A token
whose probability rounds to 0 gets the dtype's lowest number as its log-probability.

Why: A batch with top_k=1 everywhere takes another path through the sampler. That path ignores
temperatures and takes the first of the best tokens. The common path takes the logarithm of a
softmax.

What we change: Both paths report log-softmax(logits / temperature) in float32, and take the first
of the best tokens where top_k is 1. Upstream turns a temperature of 0 into top_k=1 with temperature
1, so log-softmax(logits) is reported there.

Remove when: Both paths of upstream's sampler agree.
"""

from types import SimpleNamespace

import numpy as np

from patches._lookup import module, with_globals
from patches._patch import Patch, Target

_MODULE = "sgl_jax.srt.layers.sampler"


def _is_needed(greedy, _) -> bool:
    """Take the greedy path in NumPy, with temperature 2."""

    def log_softmax(logits, axis):
        return logits - np.log(np.exp(logits).sum(axis=axis, keepdims=True))

    sample = with_globals(
        greedy, jnp=np, jax=SimpleNamespace(nn=SimpleNamespace(log_softmax=log_softmax))
    )
    logits = np.log(np.array([[0.7, 0.3]], np.float32))
    metadata = SimpleNamespace(temperatures=np.full((1, 1), 2, np.float32))
    _, logprobs = sample(None, (logits, metadata, None))
    return not np.allclose(logprobs, log_softmax(logits / 2, -1), atol=1e-3)


def _log_softmax(logits, metadata):
    """The log-probabilities that are reported."""
    jax, jnp = module("jax"), module("jax.numpy")
    divided = logits.astype(jnp.float32) / metadata.temperatures.astype(jnp.float32)
    # Rounding may give the largest one a value above 0.
    return jax.nn.log_softmax(divided, axis=-1).clip(jnp.finfo(jnp.float32).min, 0.0)


def _most_probable(logits):
    """The first of the best ids. On CPU, XLA makes `argmax` a scalar loop, which takes a third of a
    small model's step. A row with NaN gets its last id there."""
    jax, jnp = module("jax"), module("jax.numpy")

    def on_cpu(logits):
        best = logits == logits.max(axis=-1, keepdims=True)
        laid_out = jax.typeof(logits).sharding
        ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1, out_sharding=laid_out)
        return jnp.where(best, ids, logits.shape[1] - 1).min(axis=-1)

    def elsewhere(logits):
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return jax.lax.platform_dependent(logits, cpu=on_cpu, default=elsewhere)


def _replace_greedy(_):
    def greedy_sampling(self, operands):
        logits, metadata, _ = operands
        return _most_probable(logits), _log_softmax(logits, metadata)

    return greedy_sampling


def _replace_regular(original):
    def regular_sampling(self, operands):
        jnp = module("jax.numpy")
        logits, metadata, *_ = operands
        ids, _ = original(self, operands)
        best = _most_probable(logits).astype(ids.dtype)
        return jnp.where(metadata.top_ks <= 1, best, ids), _log_softmax(logits, metadata)

    return regular_sampling


PATCH = Patch(
    name="batch_dependence",
    issue="not reported",
    replaced=(
        Target(_MODULE, "Sampler._greedy_sampling", _replace_greedy, ("self", "operands")),
        Target(_MODULE, "Sampler._regular_sampling", _replace_regular, ("self", "operands")),
    ),
    probe=_is_needed,
)
