"""The trainer of grpo.py: data-parallel, with the toy's model in plain JAX, and optax."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from grpo_policy import AllWeights, Params
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from enginepool import rl
from enginepool.toy.files import read_checkpoint
from enginepool.toy.model import forward

CLIP = 0.2
WARMUP_STEPS = 10


class State(NamedTuple):
    """What is trained, in float32, and the optimizer's state."""

    params: Params
    optimizer: Any


class Trainer:
    """Data-parallel: weights on every device, a batch cut into as many parts.

    Args:
        policy: Says what is trained, and what the model computes with.
        steps: The number of steps over which the learning rate falls to a tenth. Late steps at the
            full rate would learn the noise of their few groups.
        updates: Gradient steps on one batch.
        correction: What the objective's ratio compares with: the probabilities of the "rollout", or
            the trainer's own before the step ("none" and "truncated"). "truncated" also weights
            each token by `rl.importance_weights`.
    """

    def __init__(
        self,
        policy: AllWeights,
        devices: Sequence[jax.Device],
        checkpoint: Path,
        learning_rate: float,
        steps: int,
        updates: int,
        correction: str = "rollout",
    ) -> None:
        mesh = Mesh(np.array(devices), ("data",))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._by_row = NamedSharding(mesh, PartitionSpec("data"))
        self._config, stored = read_checkpoint(checkpoint)
        self._policy = policy
        self._base = {
            name: jax.device_put(jnp.asarray(value, jnp.float32), self._everywhere)
            for name, value in stored.items()
        }
        self._start = policy.start(self._base)
        rate = optax.warmup_cosine_decay_schedule(
            init_value=learning_rate / 10,
            peak_value=learning_rate,
            warmup_steps=WARMUP_STEPS,
            decay_steps=max(steps * updates, WARMUP_STEPS + 1),
            end_value=learning_rate / 10,
        )
        self._optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b2=0.98))
        self._updates, self._correction = updates, correction

    def start(self) -> State:
        return State(
            self._start, jax.device_put(self._optimizer.init(self._start), self._everywhere)
        )

    def step(
        self, state: State, batch: rl.RolloutBatch, advantages: np.ndarray
    ) -> tuple[State, dict[str, Any]]:
        """Learn from one batch.

        The metrics describe the weights before the step. `ratio` and `kl_to_rollout` compare their
        log-probabilities with the rollout's. On policy they differ by rounding alone. `kl_to_start`
        compares them with those of the first weights.
        """
        placed = jax.tree.map(lambda array: jax.device_put(array, self._by_row), batch)
        own = self._logprobs(state.params, self._base, placed)
        agreement, from_start = (
            rl.agreement(batch, np.asarray(logprobs))
            for logprobs in (own, self._logprobs(self._start, self._base, placed))
        )
        weights = np.ones_like(batch.logprobs) * advantages[:, None]
        if self._correction == "truncated":
            weights *= rl.importance_weights(batch, np.asarray(own))
        weights = jax.device_put(weights, self._by_row)
        if self._correction != "rollout":
            placed = placed._replace(logprobs=own)
        for _ in range(self._updates):
            state = self._update(state, self._base, placed, weights)
        return state, {
            "ratio": {"mean": agreement.mean, "min": agreement.min, "max": agreement.max},
            "kl_to_rollout": agreement.kl_k3,
            "worst": str(agreement.worst),
            "kl_to_start": from_start.kl_k3,
            "tokens": agreement.tokens,
        }

    @partial(jax.jit, static_argnums=0)
    def _logprobs(self, params: Params, base: Params, batch: rl.RolloutBatch) -> jax.Array:
        """The log-probability of each output token at temperature 1, [N, T]. If the batch has
        masks, it is that among the ids of the token's mask."""
        ids = jnp.concatenate([batch.prompt_ids, batch.output_ids], axis=1)
        mask = jnp.concatenate([batch.prompt_mask, batch.output_mask], axis=1)
        first = batch.prompt_ids.shape[1] - 1  # its logits give the first output token
        weights = self._policy.weights(params, base)
        logits = forward(self._config, weights, ids, mask)[:, first:-1]
        if batch.sampling_mask is not None:
            return rl.sampling_logprobs(logits, batch.output_ids, batch.sampling_mask)
        every = jax.nn.log_softmax(logits)
        return jnp.take_along_axis(every, batch.output_ids[..., None], axis=-1)[..., 0]

    # Nothing is donated, because engines may still use the previous arrays.
    @partial(jax.jit, static_argnums=0)
    def _update(
        self, state: State, base: Params, batch: rl.RolloutBatch, advantages: jax.Array
    ) -> State:
        gradients = jax.grad(self._loss)(state.params, base, batch, advantages)
        changes, optimizer = self._optimizer.update(gradients, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, changes), optimizer)

    def _loss(
        self, params: Params, base: Params, batch: rl.RolloutBatch, advantages: jax.Array
    ) -> jax.Array:
        """PPO's clipped objective, the mean over tokens.

        By default the ratio compares with the probability with which the token was sampled,
        whichever version of the weights sampled it.

        Args:
            advantages: One for each token, multiplied by its importance weight.
        """
        ratio = jnp.exp(self._logprobs(params, base, batch) - batch.logprobs)
        clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
        gain = jnp.minimum(ratio * advantages, clipped * advantages)
        return -jnp.sum(gain * batch.output_mask) / jnp.sum(batch.output_mask)
