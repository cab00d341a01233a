"""Turns requests into upstream's result dicts and chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from enginepool.dispatch.request import Call, Request, aborted
from enginepool.dispatch.wait import Chunk
from enginepool.errors import PoolClosed, PoolFailed, RequestsFailed
from enginepool.frontend.detokenizer import detokenize
from enginepool.frontend.routed_experts import EXPERTS, experts_text
from enginepool.frontend.sampling import Seeds
from enginepool.frontend.sampling_mask import mask_entries
from enginepool.frontend.score_input import (
    named_entries,
    prompt_entries,
    score_result,
    top_entries,
)
from enginepool.frontend.tokenizer import Tokenizer


def make_result(request: Request, tokenizer: Tokenizer) -> dict[str, Any]:
    """The result of a request that has ended.

    `output_ids` are all sampled ids, the stop token included, with one log-probability each. If
    the tokenizer cannot decode an output, its text is empty and its `err_type` is "tokenizer". A
    request that was only scored has the result of `score`.
    """
    if request.sampling is None:
        return score_result(request)
    try:
        text = detokenize(request, request.output_ids, tokenizer)
    except Exception as error:  # one bad output must not lose the other results
        text, reason = "", f"the tokenizer failed on the output: {error!r}"
        if (request.finish_reason or {}).get("type") != "abort":
            request.finish_reason = aborted(reason, "tokenizer")
    return _as_dict(request, text, list(request.output_ids), request.logprobs, final=True)


def empty_meta(request: Request) -> dict[str, Any]:
    """The `meta_info` of a request that has no token. Nothing has ended it yet."""
    return _as_dict(request, "", [], [], final=True)["meta_info"]


def make_chunk(chunk: Chunk, tokenizer: Tokenizer) -> dict[str, Any]:
    """The output of a streamed request so far. Its last chunk equals its result.

    Raises:
        Exception: Whatever the tokenizer raises.
    """
    request = chunk.request
    text = detokenize(request, chunk.output_ids, tokenizer, final=chunk.final)
    made = _as_dict(request, text, chunk.output_ids, chunk.logprobs, final=chunk.final)
    made["index"] = request.position
    return made


def _as_dict(
    request: Request,
    text: str,
    output_ids: list[int],
    logprobs: Sequence[float],
    *,
    final: bool,
) -> dict[str, Any]:
    # The request may have more tokens by now than the chunk.
    count = len(output_ids)
    spans = [[a, min(b, count), v] for a, b, v in list(request.weight_versions) if a < count]
    meta: dict[str, Any] = {
        "id": request.shown_rid,
        "finish_reason": request.finish_reason if final else None,
        "prompt_tokens": len(request.input_ids),
        "completion_tokens": len(output_ids),
        "cached_tokens": request.cached_tokens or 0,
        "engine_index": request.engine_index,
        "prompt_index": request.prompt_index,
        "sample_index": request.sample_index,
        "sampling_seed": _sampling_seed(request),
        "weight_version": spans[-1][2] if spans else request.call.weight_version,
        "weight_versions": spans,
        "prompt_weight_versions": list(request.prompt_weight_versions),
    }
    if request.adapter is not None or request.lora_versions:  # or a partial output had one
        name = None if request.adapter is None else request.adapter.name
        versions = [[a, min(b, count), v] for a, b, v in list(request.lora_versions) if a < count]
        meta |= {"lora_path": name, "lora_versions": versions}
    if final:
        meta["e2e_latency"] = request.finished_at - request.created
        if request.scoring is not None:
            meta |= prompt_entries(request)
        if request.return_routed_experts:
            meta[EXPERTS] = experts_text(request)
    if request.return_logprob:
        meta["output_token_logprobs"] = [
            (float(logprob), token_id, None)
            for logprob, token_id in zip(logprobs, output_ids, strict=False)
        ]
        if request.top_logprobs_num:
            meta["output_top_logprobs"] = top_entries(request.top_logprobs[:count])
        if request.named_ids:
            rows = request.named_logprobs[:count]
            meta["output_token_ids_logprobs"] = named_entries(rows, request.named_ids)
    if request.return_sampling_mask:
        meta |= mask_entries(request.kept[:count])
    return {"text": text, "output_ids": output_ids, "meta_info": meta}


def _sampling_seed(request: Request) -> int:
    """The seed that repeats this sample, with the same indices."""
    stream: Any = request.sampling
    return Seeds.given(stream.sampling_seed, request.prompt_index, request.sample_index)


def call_results(call: Call, tokenizer: Tokenizer, raise_on_error: bool) -> list[dict[str, Any]]:
    """All results of a finished call, in order.

    Raises:
        PoolFailed, PoolClosed: See `raise_failure`.
        RequestsFailed: An output ended early, with `raise_on_error`.
    """
    raise_failure(call, tokenizer)
    results = [make_result(request, tokenizer) for request in call.requests]
    if raise_on_error:
        RequestsFailed.check(results)
    return results


def raise_failure(call: Call, tokenizer: Tokenizer) -> None:
    """Raise the error that ended the whole call, if there is one: PoolFailed, PoolClosed …"""
    if isinstance(call.failure, PoolFailed | PoolClosed):
        results = [make_result(request, tokenizer) for request in call.requests]
        raise type(call.failure)(str(call.failure), results=results)
    if call.failure is not None:
        raise call.failure
