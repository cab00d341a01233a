"""Compares the probabilities that trainer and engines give to the same tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from enginepool import InvalidRequest
from enginepool.rl.batch import RolloutBatch, checked_logprobs


@dataclass(frozen=True)
class WorstToken:
    """The token with the largest difference between trainer and rollout.

    Attributes:
        row: Its row in the batch.
        position: Its position in the output.
        weight_version: The version of the weights that sampled it.
    """

    row: int
    prompt_index: int
    sample_index: int
    position: int
    token_id: int
    weight_version: int | str
    trainer_logprob: float
    rollout_logprob: float

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt_index}, sample {self.sample_index}, position {self.position} "
            f"(token {self.token_id}, version {self.weight_version}): trainer "
            f"{self.trainer_logprob:.4f}, rollout {self.rollout_logprob:.4f}"
        )


@dataclass(frozen=True)
class Agreement:
    """Statistics of the ratio exp(trainer - rollout) of each token's probabilities.

    Attributes:
        tokens: The number of tokens that were compared.
        mean: 1 in expectation, whatever the trainer computes, if the rollout's log-probabilities
            are those of the distribution that was sampled from. So it does not show a wrong
            trainer, and `kl_k3` does.
        min, max: 1 except for rounding, if both are the same model.
        kl_k1, kl_k3: Schulman's estimators of KL(rollout || trainer) by token: the mean of rollout
            - trainer, and of ratio - 1 - log ratio, which is never negative.
        worst: The token with the largest difference of log-probabilities. NaN counts as the
            largest.
        by_version: The statistics of each weight version. Empty if there is only one version.
    """

    tokens: int
    mean: float
    min: float
    max: float
    kl_k1: float
    kl_k3: float
    worst: WorstToken
    by_version: dict[int | str, Agreement] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"ratio {self.mean:.4f} ({self.min:.4f} to {self.max:.4f}) over {self.tokens} tokens, "
            f"KL {self.kl_k1:.2e} (k1) {self.kl_k3:.2e} (k3); worst: {self.worst}"
        )


def agreement(batch: RolloutBatch, trainer_logprobs: ArrayLike) -> Agreement:
    """Compare the rollout's log-probabilities with the trainer's of the same tokens.

    On policy they are equal except for rounding. So wrong weights, another tokenization, another
    temperature or a mask that is off by one become visible in the first step.

    Args:
        trainer_logprobs: [N, T] like `batch.logprobs`, of softmax(logits / temperature). Values in
            the padding are ignored.

    Raises:
        InvalidRequest: The shape differs, or the batch has no token.
    """
    trainer = checked_logprobs(batch, trainer_logprobs)
    if not batch.output_mask.any():
        raise InvalidRequest(
            f"no output token to compare: {batch.aborted.sum()} of {len(batch.aborted)} results "
            "were aborted; their finish_reason says why"
        )
    trainer = trainer.astype(np.float64)
    whole = _compare(batch, trainer, batch.output_mask)
    versions = dict.fromkeys(batch.weight_versions[batch.output_mask].tolist())
    if len(versions) > 1:
        for version in versions:
            mask = batch.output_mask & (batch.weight_versions == version)
            whole.by_version[version] = _compare(batch, trainer, mask)
    return whole


def _compare(batch: RolloutBatch, trainer: np.ndarray, mask: np.ndarray) -> Agreement:
    # Infinities and NaN of the trainer show in the figures.
    with np.errstate(over="ignore", invalid="ignore"):
        log_ratio = trainer[mask] - batch.logprobs[mask].astype(np.float64)
        ratio = np.exp(log_ratio)
        # argmax treats NaN as the largest number.
        row, position = np.argwhere(mask)[np.abs(log_ratio).argmax()].tolist()
        return Agreement(
            tokens=int(mask.sum()),
            mean=float(ratio.mean()),
            min=float(ratio.min()),
            max=float(ratio.max()),
            kl_k1=float(-log_ratio.mean()),
            kl_k3=float((ratio - 1 - log_ratio).mean()),
            worst=WorstToken(
                row=row,
                prompt_index=int(batch.prompt_index[row]),
                sample_index=int(batch.sample_index[row]),
                position=position,
                token_id=int(batch.output_ids[row, position]),
                weight_version=batch.weight_versions[row, position : position + 1].tolist()[0],
                trainer_logprob=float(trainer[row, position]),
                rollout_logprob=float(batch.logprobs[row, position]),
            ),
        )
