"""vLLM's routes for clients that keep token ids: ids in and out, text to ids and back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import orjson
from anyio.to_thread import run_sync
from fastapi import APIRouter, Request, Response

from enginepool.errors import InvalidRequest
from enginepool.frontend.routed_experts import EXPERTS, experts_file
from enginepool.frontend.sampling_mask import LOGPROBS, MASK, mask_rows
from enginepool.serve.bodies import CheckedRoute, with_ids
from enginepool.serve.generate_body import GenerateBody
from enginepool.serve.openai_fields import check_fields, check_template_options, not_in_a_stream
from enginepool.serve.openai_models import ChatBody
from enginepool.serve.openai_serving import Chat, token_name
from enginepool.serve.openapi_schema import GENERATION_ERRORS, errors, events
from enginepool.serve.token_models import (
    Detokenize,
    Detokenized,
    TokenChoice,
    Tokenize,
    Tokenized,
    TokenLogprob,
    TokenLogprobs,
    TokenSampling,
    TokensIn,
    TokensOut,
    TokenUsage,
)
from enginepool.serve.wire_extras import prompt_logprobs_of
from enginepool.values import described

if TYPE_CHECKING:
    from enginepool.serve.exchange import Exchange
    from enginepool.serve.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter(route_class=CheckedRoute)
    failures = 400, 401, 404, 408, 413

    @routes.post("/inference/v1/generate", responses={**GENERATION_ERRORS, 200: events(TokensOut)})
    async def generate(body: TokensIn, raw: Request) -> Response:
        """Token ids in and out."""
        with_ids(body, raw)
        exchange = service.exchange(raw)
        return await exchange.run(lambda: _generate(exchange, body))

    @routes.post("/tokenize", response_model=Tokenized, responses=errors(*failures))
    async def tokenize(body: Tokenize, raw: Request) -> Response:
        """The token ids of a text, or of a conversation by the checkpoint's template."""
        service.models.adapter_of(body.model or "")
        exchange = service.exchange(raw)
        limiter = exchange.tokenizer.limiter
        made = await run_sync(_tokenized, service, exchange, body, limiter=limiter)
        return Response(made, media_type="application/json")

    @routes.post("/detokenize", responses=errors(*failures))
    async def detokenize(body: Detokenize, raw: Request) -> Detokenized:
        """The text of token ids."""
        service.models.adapter_of(body.model or "")
        with_ids(body, raw)
        return Detokenized(prompt=await run_sync(_text, service, body))

    return routes


async def _generate(exchange: Exchange, body: TokensIn) -> Response:
    sampling = body.sampling_params
    if sampling.prompt_logprobs is not None and body.stream:
        raise not_in_a_stream("prompt_logprobs")
    obj = GenerateBody(
        input_ids=body.token_ids,
        sampling_params=sampling.as_sampling_params(),
        return_logprob=sampling.logprobs is not None,
        top_logprobs_num=sampling.logprobs or 0,
        rid=body.request_id,
        stream=body.stream,
        extra_key=body.cache_salt,
        lora_path=exchange.models.adapter_of(body.model or ""),
        return_sampling_mask=sampling.return_sampling_mask,
        return_routed_experts=sampling.return_routed_experts,
    )
    exchange.token_names = token_name
    await exchange.begin(obj, prompt_logprobs=sampling.prompt_logprobs)
    if body.stream:
        exchange.reads_new = True
        return exchange.stream(_chunks(exchange, obj, sampling))
    made = await anext(exchange.generate_request(obj))
    results = made if isinstance(made, list) else [made]
    choices = [_choice(index, result, 0) for index, result in enumerate(results)]
    for choice, result in zip(choices, results, strict=True):
        choice.routed_experts = await _experts(exchange, sampling, choice.index, result)
    reply = TokensOut(
        request_id=results[0]["meta_info"]["id"], choices=choices, usage=_usage(results)
    )
    if (width := sampling.prompt_logprobs) is not None:
        assert exchange.call is not None
        request, text = exchange.call.requests[0], exchange.tokenizer.token_text
        # Added after `model_dump`, because pydantic would check every entry again.
        rows = await run_sync(prompt_logprobs_of, request, width, text)
        return _json(reply.model_dump() | {"prompt_logprobs": rows})
    return _json(reply.model_dump())


async def _chunks(
    exchange: Exchange, obj: GenerateBody, sampling: TokenSampling
) -> AsyncIterator[str]:
    sent: dict[int, int] = {}
    async for output in exchange.generate_request(obj):
        index = output["index"]
        choice = _choice(index, output, sent.get(index, 0))
        choice.routed_experts = await _experts(exchange, sampling, index, output)
        sent[index] = len(output["output_ids"])
        chunk = TokensOut(request_id=output["meta_info"]["id"], choices=[choice])
        yield f"data: {json.dumps(chunk.model_dump())}\n\n"


def _choice(index: int, result: dict[str, Any], sent: int) -> TokenChoice:
    meta = result["meta_info"]
    logprobs = None
    if "output_token_logprobs" in meta:
        own, top = meta["output_token_logprobs"], meta["output_top_logprobs"]
        places = [
            TokenLogprob(
                token=name,
                logprob=value,
                top_logprobs=[
                    TokenLogprob(token=other, logprob=best)
                    for best, _, other in (top[place] if top else ())
                ],
            )
            for place, (value, _, name) in enumerate(own[sent:], sent)
        ]
        logprobs = TokenLogprobs(content=places)
    return TokenChoice(
        index=index,
        token_ids=result["output_ids"][sent:],
        logprobs=logprobs,
        sampling_mask=mask_rows(meta[MASK])[sent:] if MASK in meta else None,
        output_token_sampling_logprobs=meta[LOGPROBS][sent:] if MASK in meta else None,
        finish_reason=(meta["finish_reason"] or {}).get("type"),
    )


async def _experts(
    exchange: Exchange, sampling: TokenSampling, index: int, result: dict[str, Any]
) -> str | None:
    """The experts of an output that has ended, if they are wanted."""
    if EXPERTS not in result["meta_info"]:
        return None
    assert exchange.call is not None
    request, start = exchange.call.requests[index], sampling.routed_experts_prompt_start
    return await run_sync(experts_file, request, start)


def _usage(results: list[dict[str, Any]]) -> TokenUsage:
    prompt = results[0]["meta_info"]["prompt_tokens"]
    completion = sum(result["meta_info"]["completion_tokens"] for result in results)
    cached = results[0]["meta_info"]["cached_tokens"]
    return TokenUsage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details={"cached_tokens": cached},
    )


def _tokenized(service: Service, exchange: Exchange, body: Tokenize) -> bytes:
    """The reply in JSON. pydantic would look at every id again."""
    tokens, lone = _tokens(service, exchange, body)
    text = exchange.tokenizer.convert_ids_to_tokens
    strings = [text(ids) for ids in tokens] if body.return_token_strs else None
    counts = [len(ids) for ids in tokens]
    return orjson.dumps(
        {
            "count": counts[0] if lone else counts,
            "max_model_len": service.runtime.input_processor.limits.total,
            "tokens": tokens[0] if lone else tokens,
            "token_strs": strings if strings is None or not lone else strings[0],
        }
    )


def _tokens(service: Service, exchange: Exchange, body: Tokenize) -> tuple[list[list[int]], bool]:
    """The ids of each prompt, and whether a single prompt was sent."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages, and not both")
    _check_form(body)
    if body.prompt is not None:
        lone = isinstance(body.prompt, str)
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        for text in texts:
            service.prompt_limits.check_text(text)
        tokenizer = service.runtime.input_processor.tokenizer
        return tokenizer.encode(texts, special_tokens=body.add_special_tokens), lone
    chat = ChatBody(
        model="",
        messages=body.messages or [],
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
        tools=body.tools,
    )
    check_fields(chat, exchange.server_args)
    check_template_options(chat, exchange.tokenizer.refused_template_options)
    serving = Chat(exchange, service.templates)  # pyright: ignore[reportArgumentType]
    if message := serving._validate_request(chat):
        raise InvalidRequest(message)
    return [serving._adapt(chat).input_ids], True


def _check_form(body: Tokenize) -> None:
    """Refuse options of the other form, which would be ignored."""
    if body.messages is not None:
        if body.add_special_tokens and "add_special_tokens" in body.model_fields_set:
            raise InvalidRequest(
                "add_special_tokens is for a prompt; for messages the chat template adds special "
                "tokens"
            )
        return
    for name in ("continue_final_message", "chat_template_kwargs", "tools"):
        if value := getattr(body, name):
            raise InvalidRequest(f"{name}={described(value)} is for messages, and this is a prompt")


def _text(service: Service, body: Detokenize) -> str:
    tokenizer = service.runtime.input_processor.tokenizer
    size = service.runtime.input_processor.limits.vocab_size
    for token in body.tokens:
        if not 0 <= token < size:
            raise InvalidRequest(f"token id {token} is outside the vocabulary of {size} tokens")
    return tokenizer.hf.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
