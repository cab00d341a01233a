"""The limits of one engine, and checks that a prompt fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from enginepool.dispatch.routed_experts import Routing
from enginepool.errors import InvalidRequest
from enginepool.frontend.sampling import PromptSampling


@dataclass(frozen=True)
class Limits:
    """The limits of one engine, in tokens.

    Attributes:
        prompt: The longest prompt.
        total: The longest prompt plus output.
        origin: Where the limits come from, for errors.
        end_ids: The ids that end an output; see `model_config.generation.end_ids`.
        scored: The longest prompt plus continuation that can be scored.
        score_refusal: Why nothing can be scored. None if prompts can be scored.
        routing: How the model routes, if engines return which experts they chose.
    """

    prompt: int
    total: int
    vocab_size: int
    origin: str
    end_ids: frozenset[int]
    scored: int
    score_refusal: str | None
    routing: Routing | None

    @property
    def longest(self) -> int:
        """The most tokens that an engine can hold: to be scored, or of a prompt and its output."""
        return max(self.total, self.scored)


def check_ids(ids: Sequence[int], what: str, index: int, limits: Limits) -> None:
    """
    Raises:
        InvalidRequest: There are no ids, or one is outside the vocabulary.
    """
    if not ids:
        raise InvalidRequest(f"{what} is empty: give at least one token", prompt_index=index)
    low, high = min(ids), max(ids)
    if low < 0 or high >= limits.vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequest(
            f"token id {bad} is outside the vocabulary of {limits.vocab_size} tokens "
            f"(0 to {limits.vocab_size - 1})",
            prompt_index=index,
        )


def check_length(
    index: int, ids: Sequence[int], sampling: PromptSampling, limits: Limits, *, clamp: bool
) -> None:
    """
    Args:
        clamp: Accept a `max_new_tokens` that does not fit. It is cut later.

    Raises:
        InvalidRequest: The prompt, or prompt and output, do not fit one engine.
    """
    wanted, room = sampling.params.max_new_tokens, limits.total - len(ids)
    if wanted == 0:
        _check_fits(index, ids, limits.scored, limits)
        return
    _check_fits(index, ids, limits.prompt, limits)
    if sampling.explicit_length and wanted > room and not clamp:
        raise InvalidRequest(
            f"max_new_tokens={wanted} does not fit: after {len(ids)} prompt tokens there is "
            f"room for {room} ({limits.origin}); ask for at most {room} or raise that limit",
            prompt_index=index,
        )


def _check_fits(index: int, ids: Sequence[int], longest: int, limits: Limits) -> None:
    if len(ids) > longest:
        raise InvalidRequest(
            f"{len(ids)} tokens are too many: at most {longest} fit one engine "
            f"({limits.origin}); shorten the prompt or raise that limit",
            prompt_index=index,
        )
