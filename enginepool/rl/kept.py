"""The sampling masks of results as arrays: the ids that tokens were sampled from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from enginepool import InvalidRequest

_MASK, _LOGPROBS = "output_sampling_mask", "output_token_sampling_logprobs"


class KeptIds:
    """The sampling mask of one result that was not aborted.

    Attributes:
        given: Whether the result has a mask.
        logprobs: The token's log-probability among the ids of its mask, by position.
        most: The most ids of a position.
    """

    def __init__(self, meta: Mapping[str, Any], prompt_index: int) -> None:
        mask = meta.get(_MASK)
        self.given = mask is not None
        mask = mask or {"indptr": [0], "ids": [], "too_many": []}
        if mask["too_many"]:
            position, count = mask["too_many"][0]
            raise InvalidRequest(
                f"position {position} was sampled from {count} ids, and results list at most 512; "
                "sample with top_k=512 or less, or leave return_sampling_mask out",
                prompt_index=prompt_index,
            )
        self.logprobs: Sequence[float] = meta.get(_LOGPROBS, ())
        self._ids = np.asarray(mask["ids"], np.int32)
        self._counts = np.diff(np.asarray(mask["indptr"]))
        self.most = int(self._counts.max(initial=0))

    def fill(self, table: np.ndarray) -> None:
        """Put the ids into the first rows of a table."""
        listed = np.arange(table.shape[1]) < self._counts[:, None]
        table[: len(self._counts)][listed] = self._ids


def width(results: Sequence[KeptIds], limit: int | None) -> int:
    """The number of ids that a position has room for: the least power of two, or the limit."""
    most = max((one.most for one in results), default=0)
    if limit is None:
        return 1 << max(0, most - 1).bit_length()
    if most > limit:
        raise InvalidRequest(
            f"a token was sampled from {most} ids, more than max_sampling_mask={limit}; raise it "
            "or sample with a smaller top_k"
        )
    return limit
