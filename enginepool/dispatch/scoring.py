"""The log-probabilities of tokens that are given: what is asked for, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Scored(NamedTuple):
    """What one set of weights says of a prompt's tokens.

    Attributes:
        logprobs: One a token from `Scoring.start` on; None for a prompt's first, which follows
            nothing.
        top_logprobs: The most probable ones in each place, if they are asked for.
        named_logprobs: Those of `Scoring.named_ids` in each place, if there are any.
        version: The weights' label.
        update: The number of the update that brought them.
    """

    logprobs: list[float | None]
    top_logprobs: list[tuple[list[float], list[int]] | None]
    named_logprobs: list[list[float] | None]
    version: int | str
    update: int


@dataclass(slots=True, eq=False)
class Scoring:
    """What is asked of a prompt. The samples of one prompt share it, and what came of it.

    Attributes:
        start: The first token whose log-probability is wanted.
        top_logprobs_num: How many of the most probable tokens go with each.
        named_ids: Whose log-probabilities do.
        alone: Nothing is generated afterwards.
        latest: What came of it last.
    """

    start: int
    top_logprobs_num: int = 0
    named_ids: Sequence[int] = ()
    alone: bool = False
    latest: Scored | None = None
