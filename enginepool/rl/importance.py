"""Weights that correct for a rollout whose probabilities are not the trainer's."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from enginepool import InvalidRequest
from enginepool.rl.batch import RolloutBatch, checked_logprobs


def importance_weights(
    batch: RolloutBatch, trainer_logprobs: ArrayLike, cap: float = 2.0
) -> np.ndarray:
    """Truncated importance sampling: min(trainer's probability / rollout's, `cap`) of each token.

    Use it if the engines compute other probabilities than the trainer for the same weights (int8,
    other kernels): multiply each token's policy gradient by its weight. PPO's ratio then compares
    with the trainer's own probabilities before the step. The cap limits the variance and leaves a
    small bias (Ionides, 2008, "Truncated Importance Sampling"; for rollouts: Yao et al., 2025,
    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", which caps at 2).

    Args:
        trainer_logprobs: [N, T] like `batch.logprobs`, of the weights that sampled the tokens.
        cap: The largest weight.

    Returns:
        [N, T] float32; 0 in the padding. Treat it as a constant: no gradient goes through it.

    Raises:
        InvalidRequest: The shape differs, or `cap` is below 1.
    """
    trainer = checked_logprobs(batch, trainer_logprobs)
    if not cap >= 1:
        raise InvalidRequest(f"cap={cap!r}: expected 1 or more")
    mask = batch.output_mask
    weights = np.zeros(mask.shape, np.float32)
    log_ratio = trainer[mask].astype(np.float64) - batch.logprobs[mask]
    weights[mask] = np.exp(np.minimum(log_ratio, np.log(cap)))
    return weights
