"""Values that some requests want for each token beside its id and its log-probability."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from enginepool.dispatch.request import Request
from enginepool.engine.sampling_mask import kept_of
from enginepool.engine.top_logprobs import named_values, top_values

# The most probable ids and their log-probabilities, each by step, by row, by rank.
type Top = tuple[np.ndarray, np.ndarray]


class Extras(NamedTuple):
    """Values of some steps beside ids and log-probabilities. None: no row wants them.

    Attributes:
        top: The most probable ids and their log-probabilities, by step, by row.
        named: The log-probabilities of the ids that a row names, by step, by row.
        kept: The ids that a token is sampled from, by step, by row.
        experts: The experts of the id before it, by step, by row, by layer.
    """

    top: Top | None = None
    named: np.ndarray | None = None
    kept: np.ndarray | None = None
    experts: np.ndarray | None = None

    def __bool__(self) -> bool:
        return any(one is not None for one in self)

    def append_to(self, request: Request, step: int, row: int, vocab_size: int) -> None:
        """Append the values that a request wants for its token of one of these steps."""
        if (k := request.top_logprobs_num) and self.top is not None:
            ids, logprobs = self.top
            request.top_logprobs.append(top_values(logprobs[step, row], ids[step, row], k))
        if (names := request.named_ids) and self.named is not None:
            request.named_logprobs.append(named_values(self.named[step, row], len(names)))
        if request.return_sampling_mask and self.kept is not None:
            request.kept.append(kept_of(self.kept[step, row], vocab_size))
