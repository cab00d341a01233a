"""The options of the calls that generate, and the error for an unknown one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from enginepool.errors import InvalidRequest
from enginepool.frontend.sampling import NAMES
from enginepool.values import did_you_mean, seconds, shown

Prompts = str | Sequence[str] | None
Params = Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None


class CallOptions(TypedDict, total=False):
    """The options of every call that generates. The value None is the same as no option.

    Attributes:
        input_ids: Token ids instead of text: one prompt, or a list of prompts. Not for `chat`.
        add_special_tokens: False: the tokenizer adds no special tokens to a text. Use it for text
            that has them already, such as a rendered chat template. Not for `chat`.
        return_logprob: Return `meta_info["output_token_logprobs"]`: one (logprob, id, None) for
            each output token. The log-probabilities are those of softmax(logits / temperature)
            before top-k, top-p and min-p. At temperature 0 they are those of softmax(logits).
            Penalties, `min_new_tokens` and grammars change the logits first.
        top_logprobs_num: Also return the most probable ids of each step, 20 at most.
        token_ids_logprob: Also return the log-probabilities of these ids in each step, in
            `meta_info["output_token_ids_logprobs"]`. Give one list for all prompts or one list a
            prompt, of 64 ids at most. An id that cannot be sampled has -inf.
        return_sampling_mask: Return the sampling mask of each output token: the ids that grammar,
            `min_new_tokens`, top-k, top-p and min-p had left. At temperature 0 it is the token
            alone. `meta_info["output_sampling_mask"]` has `indptr` and `ids`, as in CSR: the ids of
            position i are `ids[indptr[i]:indptr[i + 1]]`, ascending. At most 512 ids are listed.
            The row of a larger mask is empty, and `too_many` has [i, number of ids]. A mask of the
            whole vocabulary has an empty row and no such entry.
            `meta_info["output_token_sampling_logprobs"]` has the token's log-probability among the
            ids that were left.
        return_routed_experts: Return `meta_info["routed_experts"]`, in sglang's form: base64 of
            int32, [prompt + output tokens - 1, layers, experts a token], -1 in dense layers. Row i
            has the experts of token i in the step that sampled token i + 1. The pool needs
            `enable_return_routed_experts=True`. A stream has it in its last chunk.
        return_prompt_logprob: Return `meta_info["input_token_logprobs"]`: one (logprob, id, None)
            for each prompt token, at temperature 1. That of the first token is None. A prompt is
            scored once for all its samples, before they are sampled.
            `meta_info["input_logprobs_weight_version"]` names the weights that scored it. With
            `top_logprobs_num` there is also `meta_info["input_top_logprobs"]`, with
            `token_ids_logprob` also `meta_info["input_token_ids_logprobs"]`. A stream has them in
            its last chunk.
        logprob_start_len: The index of the first prompt token to score. One number for all prompts,
            or one per prompt.
        prompt_indices: The indices of these prompts in a larger batch, one per prompt.
            `meta_info["prompt_index"]` shows them, and seeded samples depend on them. So a batch
            has the same outputs however it is split into calls.
        sample_indices: The index of each sample in the larger batch. Each prompt has one (n=1).
        partial_outputs: The part of each output that exists already: None, or a dict like a result
            or a chunk. It has `output_ids` and, in `meta_info`, `weight_versions` and whichever of
            `output_token_logprobs`, `output_top_logprobs`, `output_token_ids_logprobs`,
            `output_sampling_mask` and `output_token_sampling_logprobs` the call asks for. It may
            have `routed_experts`. Otherwise the experts of its tokens are computed with the current
            weights. The output continues from there, and the result has all of it. The tokens of
            the part count for `max_new_tokens` and `completion_tokens`, not for `prompt_tokens`. A
            complete output is returned without a step, with the experts that it has. Each prompt
            has one sample (n=1).
        lora_path: The name of the adapter to generate with, for all prompts or one per prompt. None
            is the base. With an adapter, `meta_info` has `lora_path` and `lora_versions`: the spans
            of the adapter's versions, as `weight_versions` has those of the base.
        timeout: Seconds for the whole call. An output that is not finished by then keeps its place
            in the results, with the tokens that it has and
            `finish_reason {"type": "abort", "err_type": "timeout"}`.
    """

    input_ids: Sequence[int] | Sequence[Sequence[int]] | None
    add_special_tokens: bool | None
    return_logprob: bool | None
    top_logprobs_num: int | None
    token_ids_logprob: Sequence[int] | Sequence[Sequence[int] | None] | None
    return_sampling_mask: bool | None
    return_routed_experts: bool | None
    return_prompt_logprob: bool | None
    logprob_start_len: int | Sequence[int] | None
    prompt_indices: Sequence[int] | None
    sample_indices: Sequence[int] | None
    partial_outputs: Sequence[Mapping[str, Any] | None] | None
    lora_path: str | Sequence[str | None] | None
    timeout: float | None


# Not for `chat`: its template makes ids, special tokens included.
_OF_PROMPTS = ("input_ids", "add_special_tokens")
# The parameters in each call's own signature.
_OWN = {
    "generate": ("prompt", "sampling_params", "raise_on_error"),
    "generate_all": ("prompts", "sampling_params", "progress", "raise_on_error"),
    "stream": ("prompt", "sampling_params"),
    "as_completed": ("prompts", "sampling_params"),
    "chat": ("messages", "sampling_params", "chat_template_kwargs", "raise_on_error"),
}


def check_options(verb: str, options: Mapping[str, Any]) -> CallOptions:
    """Check the names of a call's options, and its `timeout`.

    Raises:
        InvalidRequest: A name is unknown. The message says where it belongs, or the nearest name.
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
