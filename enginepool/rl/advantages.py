"""How much better a sample is than the others of its prompt."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from enginepool import InvalidRequest


def group_advantages(
    rewards: ArrayLike,
    prompt_index: ArrayLike,
    *,
    valid: ArrayLike | None = None,
    divide_by_std: bool = True,
    epsilon: float = 1e-6,
) -> np.ndarray:
    """GRPO's advantages: (reward - mean of the group) / standard deviation of the group.

    The deviation is that of a sample (n - 1), as in verl and TRL. Advantages are exactly 0 in a
    group of equal rewards, and in a group with one valid sample.

    Args:
        rewards: [N].
        prompt_index: [N], equal within a group: indices, or names such as verl's uid. Groups may
            have any order and any size.
        valid: [N] bool, such as `~batch.aborted`. An invalid sample gets 0 and counts for no mean
            and no deviation.
        divide_by_std: False: only subtract the mean, as Dr. GRPO does.
        epsilon: Added to the deviation.

    Returns:
        [N] float32.

    Raises:
        InvalidRequest: Shapes differ, or the reward of a valid sample is not finite.
    """
    values = np.asarray(rewards, np.float64)
    groups = np.asarray(prompt_index)
    counts = np.ones(values.shape, bool) if valid is None else np.asarray(valid, bool)
    if values.ndim != 1 or not values.shape == groups.shape == counts.shape:
        raise InvalidRequest(
            f"rewards {values.shape}, prompt_index {groups.shape} and valid {counts.shape}: "
            "expected one dimension, with one entry for each sample"
        )
    bad = np.flatnonzero(counts & ~np.isfinite(values))
    if bad.size:
        is_index = np.issubdtype(groups.dtype, np.integer)
        raise InvalidRequest(
            f"sample {bad[0]} has reward {values[bad[0]]}: expected a finite number; valid=False "
            "leaves a sample out",
            prompt_index=int(groups[bad[0]]) if is_index else None,
        )
    _, group = np.unique(groups, return_inverse=True)
    # The least reward is subtracted first, so equal rewards give exactly 0. Without that their mean
    # may differ from them in the last digit, which the division by epsilon would enlarge.
    least = np.full(group.max(initial=0) + 1, np.inf)
    np.minimum.at(least, group[counts], values[counts])
    above = np.where(counts, values, 0.0)
    above[counts] -= least[group[counts]]
    size = np.bincount(group, counts, len(least))
    mean = np.bincount(group, above, len(least)) / np.maximum(size, 1)
    advantages = np.where(counts, above - mean[group], 0.0)
    if divide_by_std:
        square = np.bincount(group, advantages**2, len(least))
        advantages /= (np.sqrt(square / np.maximum(size - 1, 1)) + epsilon)[group]
    return advantages.astype(np.float32)
