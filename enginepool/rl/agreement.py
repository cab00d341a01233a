"""Whether trainer and engines mean the same model: their probabilities of the same tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from enginepool import InvalidRequest
from enginepool.rl.batch import RolloutBatch


@dataclass(frozen=True)
class WorstToken:
    """Where trainer and rollout are furthest apart.

    Attributes:
        row: In the batch.
        position: In the output.
        weight_version: Of the weights that it was sampled from.
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
    """Statistics of exp(trainer - rollout), a token's probability in one over that in the other.

    Attributes:
        tokens: How many were compared.
        mean: 1 in expectation, whatever the trainer's model, as long as the rollout's
            log-probabilities are those of the law that was sampled from; see `kl_k3` too.
        min, max: 1 and 1 where both are the same model, but for rounding.
        kl_k1, kl_k3: Schulman's estimators of KL(rollout || trainer) by token: the mean of
            rollout - trainer, and of ratio - 1 - log ratio, which is never negative.
        worst: The largest difference of log-probabilities; one that is NaN above all.
        by_version: The same of each version's tokens, if there are several.
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

    On policy they are equal but for rounding, so that whatever is amiss (other weights, another
    tokenization, another temperature, a mask that is off by one) is seen in the first step.

    Args:
        trainer_logprobs: [N, T] as `batch.logprobs`, of softmax(logits / temperature); what
            stands in the padding is not looked at.

    Raises:
        InvalidRequest: Another shape, or a batch without a token.
    """
    trainer = np.asarray(trainer_logprobs)
    if trainer.shape != batch.logprobs.shape:
        raise InvalidRequest(
            f"trainer_logprobs has shape {trainer.shape}, the batch's are {batch.logprobs.shape}: "
            "expected one an output token, padding included"
        )
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
    # An infinity or a NaN of the trainer's is a finding, and in the figures.
    with np.errstate(over="ignore", invalid="ignore"):
        log_ratio = trainer[mask] - batch.logprobs[mask].astype(np.float64)
        ratio = np.exp(log_ratio)
        # To argmax a NaN is more than any number.
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
