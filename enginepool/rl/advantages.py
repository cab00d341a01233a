"""How much better a sample was than the others of its prompt."""

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
    """GRPO's advantages: a reward less the mean of its group, over the group's deviation.

    The deviation is that of a sample (n - 1), as verl and TRL have it. A group that is all equal
    teaches nothing and gets exactly 0, and so does one of which a single sample is valid.

    Args:
        rewards: [N].
        prompt_index: [N], equal within a group; in any order, and groups of any sizes.
        valid: [N] bool; a sample that is not (`~batch.aborted`) gets 0 and is in neither mean nor
            deviation: the group is of those that are left.
        divide_by_std: Without it the difference alone, as Dr. GRPO has it.
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
            "expected one of each a sample, in one dimension"
        )
    bad = np.flatnonzero(counts & ~np.isfinite(values))
    if bad.size:
        raise InvalidRequest(
            f"sample {bad[0]} has reward {values[bad[0]]}: expected a finite number; valid=False "
            "leaves a sample out",
            prompt_index=int(groups[bad[0]]),
        )
    _, group = np.unique(groups, return_inverse=True)
    # From the group's least: a mean of equal numbers may differ from them in the last digit, and
    # epsilon would make much of that.
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
