"""Options of the calls that generate, and what is said of a name that is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from enginepool.errors import InvalidRequest
from enginepool.frontend.sampling import NAMES
from enginepool.values import did_you_mean, seconds, shown

Prompts = str | Sequence[str] | None
Params = Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None


class CallOptions(TypedDict, total=False):
    """Options of every call that generates. None leaves one out, as leaving it out does.

    Attributes:
        input_ids: Token ids instead of text: one prompt, or a list of them. `chat` has none of them
            and no `add_special_tokens`.
        add_special_tokens: False for text that has its special tokens already, as a rendered chat
            template has: the tokenizer adds none, such as a second one at the beginning.
        return_logprob: Give `meta_info["output_token_logprobs"]`, one (logprob, id, None) an id.
            They are those of softmax(logits / temperature) before top-k, top-p and min-p, at
            temperature 0 of softmax(logits); of logits after the penalties and `min_new_tokens`.
        top_logprobs_num: Give the most probable ids of each step as well; at most 20.
        token_ids_logprob: Give the log-probabilities of these ids in each step as well, in
            `meta_info["output_token_ids_logprobs"]`: one list for all prompts, or one a prompt, of
            64 at most. They are -inf where an id cannot come.
        return_prompt_logprob: Give `meta_info["input_token_logprobs"]`, one (logprob, id, None) a
            token of the prompt, at temperature 1; the first token's is None. They are computed
            apart from the sampling, before it, by the weights that
            `meta_info["input_logprobs_weight_version"]` names; once for the samples of a prompt.
            With `top_logprobs_num` also `meta_info["input_top_logprobs"]`, with
            `token_ids_logprob` also `meta_info["input_token_ids_logprobs"]`. A stream has them in
            its last chunk.
        logprob_start_len: From which token of the prompt on; one for all prompts, or one a prompt.
        prompt_indices: Which prompts of a larger batch these are, one number a prompt: what
            `meta_info["prompt_index"]` says, and what seeded samples are drawn by. So a batch
            gives the same however it is split into calls.
        sample_indices: Likewise which sample each is; each is one (n=1).
        partial_outputs: What of each output is there already, None or a dict as results and
            chunks are: `output_ids`, and of `meta_info` `output_token_logprobs` and
            `output_top_logprobs` and `output_token_ids_logprobs` (needed if the call asks for
            them) and `weight_versions`. The output goes on behind it and comes back whole, as if
            it had been made in one go:
            `max_new_tokens` and `completion_tokens` count it, `prompt_tokens` does not. One
            that is complete comes back without a step. Each is one sample (n=1).
        timeout: Seconds for the whole call. What is not finished then keeps its place, with what
            it has and `finish_reason {"type": "abort", "err_type": "timeout"}`.
    """

    input_ids: Sequence[int] | Sequence[Sequence[int]] | None
    add_special_tokens: bool
    return_logprob: bool
    top_logprobs_num: int
    token_ids_logprob: Sequence[int] | Sequence[Sequence[int] | None] | None
    return_prompt_logprob: bool
    logprob_start_len: int | Sequence[int]
    prompt_indices: Sequence[int] | None
    sample_indices: Sequence[int] | None
    partial_outputs: Sequence[Mapping[str, Any] | None] | None
    timeout: float | None


# What a template makes of messages has all of it.
_OF_PROMPTS = ("input_ids", "add_special_tokens")
# Parameters of a call's own, as its signature has them.
_OWN = {
    "generate": ("prompt", "sampling_params", "raise_on_error"),
    "generate_all": ("prompts", "sampling_params", "progress", "raise_on_error"),
    "stream": ("prompt", "sampling_params"),
    "as_completed": ("prompts", "sampling_params"),
    "chat": ("messages", "sampling_params", "chat_template_kwargs", "raise_on_error"),
}


def check_options(verb: str, options: Mapping[str, Any]) -> CallOptions:
    """The options of a call, with a `timeout` that can be waited for.

    Raises:
        InvalidRequest: A name that is none of them, with where it belongs or the nearest.
    """
    known = list(CallOptions.__annotations__)
    if verb == "chat":
        known = [name for name in known if name not in _OF_PROMPTS]
    for name, value in options.items():
        if name not in known:
            raise InvalidRequest(_unknown(verb, name, value, [*_OWN[verb], *known]))
    checked = CallOptions(**options)
    checked["timeout"] = seconds("timeout", options.get("timeout"))
    return checked


def _unknown(verb: str, name: str, value: Any, known: Sequence[str]) -> str:
    given = f"{verb}: {name}={shown(value)}"
    if name in NAMES:
        return f"{given} is a sampling parameter: give {_as_parameter(name, value)}"

    def written(near: str) -> str:
        return f"{near}=" if near in known else _as_parameter(near, value)

    hint = did_you_mean(name, [*known, *NAMES], written) or f"; it takes {', '.join(known)}"
    return f"{given} is unknown{hint}"


def _as_parameter(name: str, value: Any) -> str:
    return f'sampling_params={{"{name}": {shown(value)}}}'
