"""Prompt scoring: the log-probabilities that a request wants of its prompt, and their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from enginepool.lora.adapter import Adapter


class Scored(NamedTuple):
    """The scores of a prompt's tokens under one set of weights.

    Attributes:
        logprobs: One for each token from `Scoring.start` on. None for a prompt's first token.
        top_logprobs: The most probable tokens at each, if they are wanted.
        named_logprobs: The log-probabilities of `Scoring.named_ids` at each, if there are any.
        version: The label of the weights.
        update: The number of the update that brought the weights.
        adapter: The adapter that they were computed with, if any.
    """

    logprobs: list[float | None]
    top_logprobs: list[tuple[list[float], list[int]] | None]
    named_logprobs: list[list[float] | None]
    version: int | str
    update: int
    adapter: Adapter | None


@dataclass(slots=True, eq=False)
class Scoring:
    """The scores that are wanted of a prompt. All samples of the prompt share this object.

    Attributes:
        start: The first token that is scored.
        top_logprobs_num: How many of the most probable tokens are wanted at each token.
        named_ids: The ids whose log-probabilities are wanted at each token.
        alone: Whether the request generates nothing afterwards.
        latest: The latest result.
    """

    start: int
    top_logprobs_num: int = 0
    named_ids: Sequence[int] = ()
    alone: bool = False
    latest: Scored | None = None
