"""Turns the arguments of `score` into a `Call`, and its requests into results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from enginepool.dispatch.request import Call, Request
from enginepool.dispatch.scoring import Scoring
from enginepool.errors import InvalidRequest
from enginepool.frontend.input_processor import InputProcessor
from enginepool.frontend.limits import Limits, check_ids
from enginepool.frontend.logprob_options import check_named_ids, check_top_logprobs
from enginepool.frontend.prompts import read_prompts


def make_score_call(
    processor: InputProcessor,
    prompts: str | Sequence[str] | None,
    continuations: str | Sequence[str] | None,
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    continuation_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    *,
    top_logprobs_num: int | None = None,
    token_ids_logprob: Any = None,
    lora_path: Any = None,
    pinned_to: int | None = None,
    weight_version: int | str = 0,
) -> Call:
    """Build the requests of a call, one for each continuation.

    Raises:
        InvalidRequest: The error has the prompt's index, the value, the limit and the remedy.
    """
    limits = processor.limits
    if limits.score_refusal is not None:
        raise InvalidRequest(f"score is not possible in this pool: {limits.score_refusal}")
    tokenizer = processor.tokenizer
    _, before, lone = read_prompts(tokenizer, prompts, input_ids)
    _, after, one = read_prompts(
        tokenizer,
        continuations,
        continuation_ids,
        names=("continuations", "continuation_ids"),
        special_tokens=False,
    )
    if lone and not one:
        before *= len(after)
    if len(before) != len(after):
        raise InvalidRequest(
            f"{len(after)} continuations for {len(before)} prompts: give one per prompt, or one "
            "prompt for all of them"
        )
    top = check_top_logprobs(top_logprobs_num)
    named = check_named_ids(token_ids_logprob, len(before), limits.vocab_size)
    for index, (prompt, continuation) in enumerate(zip(before, after, strict=True)):
        _check_fits(prompt, continuation, index, limits)
    adapters = processor.adapters_of(lora_path, len(before))
    call = Call(weight_version, lone=lone and one)
    for index, (prompt, continuation) in enumerate(zip(before, after, strict=True)):
        scoring = Scoring(len(prompt), top, named[index], alone=True)
        request = Request(
            call,
            prompt + continuation,
            None,
            prompt_index=index,
            pinned_to=pinned_to,
            adapter=adapters[index],
            scoring=scoring,
        )
        call.add(request)
    return call


def _check_fits(
    prompt: Sequence[int], continuation: Sequence[int], index: int, limits: Limits
) -> None:
    check_ids(prompt, "the prompt", index, limits)
    check_ids(continuation, "the continuation", index, limits)
    if len(prompt) + len(continuation) > limits.scored:
        raise InvalidRequest(
            f"{len(prompt)} prompt tokens and {len(continuation)} of the continuation are too "
            f"long: at most {limits.scored} together fit one engine ({limits.origin}); shorten "
            "them or raise that limit",
            prompt_index=index,
        )


def score_result(request: Request) -> dict[str, Any]:
    """The result of a request that was only scored. It has no values if the request ended early."""
    scoring, scored = request.scoring, request.scored
    assert scoring is not None
    version = request.call.weight_version if scored is None else scored.version
    result: dict[str, Any] = {
        "logprobs": [] if scored is None else scored.logprobs,
        "continuation_ids": request.input_ids[scoring.start :],
    }
    if scoring.top_logprobs_num:
        result["top_logprobs"] = [] if scored is None else top_entries(scored.top_logprobs)
    if named := scoring.named_ids:
        rows = [] if scored is None else scored.named_logprobs
        result["token_ids_logprobs"] = named_entries(rows, named)
    of_adapter: dict[str, Any] = {}
    if request.adapter is not None:
        adapter = (scored and scored.adapter) or request.adapter
        of_adapter = {"lora_path": adapter.name, "lora_version": adapter.version}
    return result | {
        "meta_info": {
            "id": request.shown_rid,
            "finish_reason": request.finish_reason,
            "prompt_tokens": scoring.start,
            "continuation_tokens": len(request.input_ids) - scoring.start,
            "engine_index": request.engine_index,
            "prompt_index": request.prompt_index,
            "weight_version": version,
            "e2e_latency": request.finished_at - request.created,
            **of_adapter,
        },
    }


def prompt_entries(request: Request) -> dict[str, Any]:
    """The entries of a result about its prompt's tokens, under upstream's names."""
    scoring, scored = request.scoring, request.scored
    assert scoring is not None
    ids = request.input_ids[scoring.start :]
    entries: dict[str, Any] = {
        "logprob_start_len": scoring.start,
        "input_token_logprobs": [],
        "input_logprobs_weight_version": None,
    }
    if scoring.top_logprobs_num:
        entries["input_top_logprobs"] = []
    if scoring.named_ids:
        rows = [] if scored is None else scored.named_logprobs
        entries["input_token_ids_logprobs"] = named_entries(rows, scoring.named_ids)
    if scored is not None:
        entries["input_logprobs_weight_version"] = scored.version
        entries["input_token_logprobs"] = [
            (value, token_id, None) for value, token_id in zip(scored.logprobs, ids, strict=True)
        ]
        if scoring.top_logprobs_num:
            entries["input_top_logprobs"] = top_entries(scored.top_logprobs)
    return entries


def top_entries(rows: Sequence[tuple[Sequence[float], Sequence[int]] | None]) -> list[Any]:
    """Entries (log-probability, id, None) in upstream's form. None for a prompt's first token."""
    return [
        None
        if row is None
        else [(value, token_id, None) for value, token_id in zip(*row, strict=True)]
        for row in rows
    ]


def named_entries(rows: Sequence[list[float] | None], ids: Sequence[int]) -> list[Any]:
    """`top_entries` for the ids that a call names."""
    return top_entries([None if row is None else (row, ids) for row in rows])
