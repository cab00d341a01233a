"""The log-probabilities that a call asks for, and its masks and experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from enginepool.dispatch.request import MAX_NAMED_IDS, MAX_TOP_LOGPROBS
from enginepool.dispatch.scoring import Scoring
from enginepool.errors import InvalidRequest
from enginepool.frontend.call_options import CallOptions
from enginepool.frontend.limits import Limits, check_ids
from enginepool.values import flag, is_int, plain, shown


@dataclass(frozen=True)
class Logprobs:
    """The log-probabilities that a call wants.

    Attributes:
        outputs: Whether it wants log-probabilities of output tokens.
        top: How many of the most probable tokens it wants with each output token.
        prompt_top: The same for each prompt token.
        named_ids: The ids whose log-probabilities it wants with each token, by prompt.
        sampling_mask: Whether it wants the ids that output tokens are sampled from.
        routed_experts: Whether it wants the experts of all tokens.
        starts: The first prompt token that is scored, by prompt. None: the prompt is not scored.
    """

    outputs: bool
    top: int
    prompt_top: int
    named_ids: Sequence[list[int]]
    sampling_mask: bool
    routed_experts: bool
    starts: Sequence[int | None]

    def for_a_request(self, index: int, *, scored_only: bool) -> dict[str, Any]:
        """The arguments of a `Request` for a sample of prompt `index`.

        Args:
            scored_only: Nothing is generated.

        Raises:
            InvalidRequest: The call wants routed experts and generates nothing.
        """
        if scored_only and self.routed_experts:
            raise InvalidRequest(
                "return_routed_experts=True with max_new_tokens=0: only steps that generate have "
                "them; give max_new_tokens=1",
                prompt_index=index,
            )
        start, named = self.starts[index], self.named_ids[index]
        scoring = None
        if start is not None:
            scoring = Scoring(start, self.prompt_top, named, alone=scored_only)
        return {
            "return_logprob": self.outputs,
            "top_logprobs_num": self.top,
            "named_ids": named,
            "return_sampling_mask": self.sampling_mask,
            "return_routed_experts": self.routed_experts,
            "scoring": scoring,
        }


def read_logprobs(
    options: CallOptions,
    prompt_top_logprobs_num: int | None,
    token_ids: Sequence[Sequence[int]],
    limits: Limits,
) -> Logprobs:
    """
    Args:
        prompt_top_logprobs_num: `top_logprobs_num` for prompt tokens. None: the value in the
            options.

    Raises:
        InvalidRequest: An option is wrong, or a prompt has no valid ids.
    """
    top = prompt_top = check_top_logprobs(options.get("top_logprobs_num"))
    if prompt_top_logprobs_num is not None:
        prompt_top = check_top_logprobs(prompt_top_logprobs_num)
    named = check_named_ids(options.get("token_ids_logprob"), len(token_ids), limits.vocab_size)
    outputs = flag("return_logprob", options.get("return_logprob")) or top > 0 or any(named)
    for index, prompt in enumerate(token_ids):
        check_ids(prompt, "the prompt", index, limits)
    scored = flag("return_prompt_logprob", options.get("return_prompt_logprob"))
    starts = check_starts(scored, options.get("logprob_start_len"), token_ids, limits)
    mask = flag("return_sampling_mask", options.get("return_sampling_mask"))
    experts = flag("return_routed_experts", options.get("return_routed_experts"))
    if experts and limits.routing is None:
        raise InvalidRequest(
            "return_routed_experts=True: this pool does not keep the experts of tokens; open it "
            "with enable_return_routed_experts=True"
        )
    return Logprobs(outputs, top, prompt_top, named, mask, experts, starts)


def check_top_logprobs(number: Any) -> int:
    number = plain(number)
    if number is None:
        return 0
    if not (is_int(number) and 0 <= number <= MAX_TOP_LOGPROBS):
        raise InvalidRequest(
            f"top_logprobs_num={shown(number)}: expected an integer from 0 to {MAX_TOP_LOGPROBS}"
        )
    return number


def check_named_ids(given: Any, count: int, vocab_size: int) -> Sequence[list[int]]:
    """The ids of `token_ids_logprob` for each prompt. `given` is one list, or one per prompt.

    Raises:
        InvalidRequest: The error has the value, the limit and the remedy.
    """
    given = plain(given)
    if given is None:
        return [[]] * count
    if not isinstance(given, list | tuple):
        raise InvalidRequest(
            f"token_ids_logprob={shown(given)}: expected a list of token ids, or one list per "
            "prompt"
        )
    if not given or not all(isinstance(one, list | tuple | None) for one in given):
        return [_checked(given, vocab_size, None)] * count
    if len(given) != count:
        raise InvalidRequest(
            f"token_ids_logprob has {len(given)} lists for {count} prompts: give one list of ids "
            "for all of them, or one per prompt"
        )
    return [_checked(one or (), vocab_size, index) for index, one in enumerate(given)]


def _checked(ids: Sequence[Any], vocab_size: int, index: int | None) -> list[int]:
    if len(ids) > MAX_NAMED_IDS:
        raise InvalidRequest(
            f"token_ids_logprob has {len(ids)} ids: at most {MAX_NAMED_IDS} are computed with a "
            "prompt; ask for the others in another call",
            prompt_index=index,
        )
    for token_id in ids:
        if not is_int(token_id):
            raise InvalidRequest(
                f"token_ids_logprob: {shown(token_id)} is not an integer", prompt_index=index
            )
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"token_ids_logprob: token id {shown(token_id)} is outside the vocabulary of "
                f"{vocab_size} tokens (0 to {vocab_size - 1})",
                prompt_index=index,
            )
    return list(ids)


def check_starts(
    wanted: bool, starts: Any, token_ids: Sequence[Sequence[int]], limits: Limits
) -> Sequence[int | None]:
    """The first token of each prompt whose log-probability is wanted. None: none is wanted."""
    starts = plain(starts)
    if not wanted:
        if starts is not None:
            raise InvalidRequest(
                f"logprob_start_len={shown(starts)}, the first prompt token that is scored, needs "
                "return_prompt_logprob=True"
            )
        return [None] * len(token_ids)
    if limits.score_refusal is not None:
        refusal = limits.score_refusal
        raise InvalidRequest(f"return_prompt_logprob is not possible in this pool: {refusal}")
    if not isinstance(starts, list | tuple):
        starts = [0 if starts is None else starts] * len(token_ids)
    if len(starts) != len(token_ids):
        raise InvalidRequest(
            f"logprob_start_len has {len(starts)} entries for {len(token_ids)} prompts: give "
            "one for all of them, or one per prompt"
        )
    for index, (start, ids) in enumerate(zip(starts, token_ids, strict=True)):
        if not (is_int(start) and 0 <= start < len(ids)):
            raise InvalidRequest(
                f"logprob_start_len={shown(start)}: expected an integer from 0 to "
                f"{len(ids) - 1}, the prompt's last token",
                prompt_index=index,
            )
    return starts
