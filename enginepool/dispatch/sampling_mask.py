"""The sampling mask of an output token: the ids that it was sampled from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# The most ids of a position that are listed. Every row of a batch has room for this many.
MAX_KEPT_IDS = 512


@dataclass(frozen=True, slots=True)
class Kept:
    """The ids that grammar, `min_new_tokens`, top-k, top-p and min-p left at one position.

    Attributes:
        count: The number of ids that were left. 0: the whole vocabulary.
        ids: The ids, ascending. Empty if they are the whole vocabulary or more than `MAX_KEPT_IDS`.
        logprob: The sampled token's log-probability among them.
    """

    count: int
    ids: np.ndarray
    logprob: float
