"""Log-probabilities among the ids that a token was sampled from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax
    from jax.typing import ArrayLike


def sampling_logprobs(
    logits: jax.Array,
    output_ids: ArrayLike,
    sampling_mask: ArrayLike,
    temperature: ArrayLike = 1.0,
) -> jax.Array:
    """A trainer's log-probabilities of output tokens among the ids that they were sampled from.

    Compare them with the rollout's `sampling_logprobs`. They are computed in JAX, are
    differentiable, and work under `jit`.

    Args:
        logits: [N, T, V], of the positions of the output tokens.
        output_ids, sampling_mask: As in `RolloutBatch`.
        temperature: The temperature of sampling: a number, or an array that broadcasts to [N, T].

    Returns:
        [N, T] float32. Values in the padding mean nothing.
    """
    import jax
    import jax.numpy as jnp

    ids, mask = jnp.asarray(output_ids), jnp.asarray(sampling_mask)
    divisor = jnp.asarray(temperature, jnp.float32)
    scaled = logits.astype(jnp.float32) / (divisor[..., None] if divisor.ndim else divisor)
    listed = mask >= 0
    some = listed.any(axis=-1)
    among = jnp.take_along_axis(scaled, jnp.where(listed, mask, 0), axis=-1)
    # Rows without listed ids keep the whole vocabulary. A sum over no ids would have NaN gradients.
    among = jnp.where(listed | ~some[..., None], among, -jnp.inf)
    total = jnp.where(some, jax.nn.logsumexp(among, axis=-1), jax.nn.logsumexp(scaled, axis=-1))
    return jnp.take_along_axis(scaled, ids[..., None], axis=-1, mode="clip")[..., 0] - total
