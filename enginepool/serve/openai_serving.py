"""Upstream's serving classes for OpenAI's routes, one object per request, over an exchange.

Reaches into upstream's serving classes, by calling the parts of `handle_request` one by one.

What breaks: A request that cannot be served is answered with 500, or with 200 and an error in the
stream. `seed` is dropped. In a chunk of several tokens each has the text of the first.
Why: They expect one token per chunk, and a scheduler that refuses nothing.
Remove when: They raise an error for a bad request, and pass `seed` to the engine.

The server checks at its start that these methods exist. The error names the missing ones.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from anyio.to_thread import run_sync
from fastapi import Request, Response
from sgl_jax.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sgl_jax.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sgl_jax.srt.entrypoints.openai.serving_score import OpenAIServingScore

from enginepool.dispatch.grammar import KINDS
from enginepool.dispatch.thinking import Thinking
from enginepool.errors import EnginePoolError, InvalidRequest
from enginepool.process.upstream import expect
from enginepool.serve.answer_form import form_of
from enginepool.serve.chat_stream import ChatStream
from enginepool.serve.exchange import Exchange
from enginepool.serve.openai_fields import check_fields, check_template_options
from enginepool.serve.openai_models import ChatBody, CompletionBody, ScoreBody
from enginepool.serve.rendering import why_not_rendered
from enginepool.serve.scoring import ScoreExchange
from enginepool.serve.stream_parsers import cut_calls, marks, thinking_of
from enginepool.serve.wire_extras import EchoedPrompts, StreamedIds, UsageSoFar, add_to_reply

# A mark of thinking is looked for in this many tokens at the prompt's end. No mark has more.
_LONGEST_MARK = 32
_USED = (
    *("_validate_request", "_convert_to_internal_request", "_request_id_prefix"),
    *("_handle_streaming_request", "_build_sampling_params"),
)


def check_upstream() -> None:
    """
    Raises:
        EnginePoolError: Upstream's serving classes lack a method that is used here.
    """
    expect(OpenAIServingCompletion, *_USED, "_get_echo_text", "_build_completion_response")
    expect(OpenAIServingChat, *_USED, "_process_logprobs_tokens", "_generate_chat_stream")
    expect(OpenAIServingChat, "_process_tool_calls")
    expect(OpenAIServingChat, "_get_reasoning_from_request", "_process_streaming_logprobs")
    expect(OpenAIServingChat, "_build_chat_response")
    expect(OpenAIServingScore, "_handle_non_streaming_request")


def _special_tokens(body: CompletionBody) -> bool | None:
    """Whether the tokenizer adds its special tokens to a text. Token ids stay as they are."""
    return False if not body.add_special_tokens and _is_text(body.prompt) else None


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str) or isinstance(prompt[0], str)


class _Serving:
    """What `Completion` and `Chat` have in common. An error is raised and becomes the reply's
    status. Upstream answers 500, or 200 with an error in the stream."""

    async def reply(self: Any, body: Any, raw: Request) -> Response:
        if message := self._validate_request(body):
            raise InvalidRequest(message)
        exchange: Exchange = self.tokenizer_manager
        check_fields(body, exchange.server_args)
        chat = isinstance(body, ChatBody)
        if chat:
            check_template_options(body, exchange.tokenizer.refused_template_options)
        adapter = exchange.models.adapter_of(body.model)
        if body.return_tokens_as_token_ids:
            exchange.token_names, exchange.sampled_as_top = token_name, not chat
        adapted = await run_sync(self._adapt, body, limiter=exchange.tokenizer.limiter)
        adapted.lora_path = adapter
        thinking = self._thinking(body) if chat else None
        await exchange.begin(
            adapted,
            self._request_id_prefix(),
            body.prompt_logprobs,
            thinking,
            special_tokens=None if chat else _special_tokens(body),
        )
        call, text = exchange.call, exchange.tokenizer.token_text
        assert call is not None
        if body.stream:
            return await self._stream_reply(body, adapted, raw)
        try:
            made = await anext(exchange.generate_request(adapted, raw))
        except ValueError as error:
            raise exchange.failure or error from error
        results = made if isinstance(made, list) else [made]

        def whole() -> Response:
            made = self._build(body, results, int(time.time()))
            if isinstance(made, Response):
                return made
            if (
                body.return_token_ids
                or body.return_sampling_mask
                or body.return_routed_experts
                or body.prompt_logprobs is not None
            ):
                reply = orjson.dumps(add_to_reply(made.model_dump(), call, body, text, chat=chat))
            else:
                reply = made.model_dump_json()
            return Response(reply, media_type="application/json")

        return await exchange.on_thread_if_large(whole, results)

    async def _stream_reply(self: Any, body: Any, adapted: Any, raw: Request) -> Response:
        exchange: Exchange = self.tokenizer_manager
        chat, call = isinstance(body, ChatBody), exchange.call
        assert call is not None
        exchange.reads_new = True
        streamed = await self._handle_streaming_request(adapted, body, raw)
        pieces = streamed.body_iterator
        if body.return_token_ids:
            ids = StreamedIds(call, chat=chat)
            exchange.watchers.append(ids.observe)
            pieces = ids.with_fields(pieces)
        if body.stream_options and body.stream_options.continuous_usage_stats:
            usage = UsageSoFar()
            exchange.watchers.append(usage.observe)
            pieces = usage.with_fields(pieces)
        if not chat and body.echo:
            echoed = EchoedPrompts(lambda index: self.echo_text(body, index))
            exchange.watchers.append(echoed.observe)
        return exchange.stream(pieces)

    def _adapt(self: Any, body: Any) -> Any:
        """Upstream's GenerateReqInput for a body; applies the chat template and encodes."""
        try:
            adapted, _ = self._convert_to_internal_request(body)
        except EnginePoolError:
            raise
        # Templates and parsers may raise anything.
        except Exception as error:
            why = why_not_rendered(error, body)
            raise InvalidRequest(f"this request cannot be turned into a prompt: {why}") from error
        if body.seed is not None:
            adapted.sampling_params["sampling_seed"] = body.seed  # upstream drops it
        if getattr(body, "echo", False) and body.logprobs is not None:
            adapted.logprob_start_len = 0  # upstream's -1 gives none for logprobs=0
        if body.cache_salt is not None:
            adapted.extra_key = body.cache_salt
        adapted.return_sampling_mask = body.return_sampling_mask
        adapted.return_routed_experts = body.return_routed_experts
        return adapted

    def _build_sampling_params(self: Any, request: Any, *args: Any, **more: Any) -> dict[str, Any]:
        exchange: Exchange = self.tokenizer_manager
        special = getattr(exchange.tokenizer, "all_special_tokens", ())
        form = form_of(request, exchange.server_args, special)
        params = super()._build_sampling_params(request, *args, **more)  # pyright: ignore
        params = {name: value for name, value in params.items() if name not in KINDS}
        return params | request.as_sampling_params() | form


class Completion(_Serving, OpenAIServingCompletion):
    _build = OpenAIServingCompletion._build_completion_response

    def echo_text(self, body: CompletionBody, index: int) -> str:
        """The prompt of an output."""
        return super()._get_echo_text(body, index)

    def _get_echo_text(self, request: Any, index: int) -> str:
        del request, index
        return ""  # `EchoedPrompts` has put it there


class Score(OpenAIServingScore):
    async def reply(self: Any, body: ScoreBody, raw: Request) -> Response:
        exchange: ScoreExchange = self.tokenizer_manager
        exchange.adapter = exchange.models.adapter_of(body.model)
        made = await self._handle_non_streaming_request(body, body, raw)
        if exchange.failure is not None:
            raise exchange.failure
        return Response(made.model_dump_json(), media_type="application/json")


class Chat(_Serving, OpenAIServingChat):
    _build = OpenAIServingChat._build_chat_response
    _prompt_end = ""  # the text of its last tokens

    def _adapt(self: Any, body: Any) -> Any:
        if body.continue_final_message and isinstance(body.messages[-1].content, list):
            # Upstream encodes it after the template, as one string.
            body.messages[-1].content = " ".join(part.text for part in body.messages[-1].content)
        adapted = super()._adapt(body)
        exchange: Exchange = self.tokenizer_manager
        ids, params = adapted.input_ids, adapted.sampling_params
        self._prompt_end = exchange.tokenizer.decode(ids[-_LONGEST_MARK:]).rstrip()
        given = (params["max_new_tokens"], (body.custom_params or {}).get("max_new_tokens"))
        if given == (None, None):  # as in OpenAI's server, only the context limits the answer
            room = exchange.runtime.input_processor.limits.total - len(ids)
            params["max_new_tokens"] = max(1, room)
        return adapted

    def _get_reasoning_from_request(self: Any, request: Any) -> bool:
        """Whether the answer may begin with reasoning. A template that switches thinking off ends
        the prompt with the mark that ends thinking. Then this is False. Upstream would take the
        whole answer for reasoning."""
        wanted = super()._get_reasoning_from_request(request)
        if not wanted:
            return False
        _, end = marks(self.tokenizer_manager.server_args.reasoning_parser)
        return not self._prompt_end.endswith(end)

    def _thinking(self: Any, body: Any) -> Thinking | None:
        exchange: Exchange = self.tokenizer_manager
        if not self._get_reasoning_from_request(body):
            return None
        return thinking_of(
            exchange.server_args.reasoning_parser, exchange.tokenizer, self._prompt_end
        )

    def _process_tool_calls(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, text: str, tools: Any, tool_call_parser: Any, finish_reason: Any, **choice: Any
    ) -> Any:
        """A call that was cut is returned as far as it goes, as in a stream. Upstream only finds
        whole calls. If a mark has no call after it, upstream returns the finish reason
        "tool_calls" without calls."""
        if finish_reason["type"] == "stop":
            # Upstream changes the reason, and this one is the request's own.
            reason = dict(finish_reason)
            calls, said, reason = super()._process_tool_calls(
                text, tools, tool_call_parser, reason, **choice
            )
            if calls or reason["type"] == "stop":
                return calls, said, reason
        calls, said = cut_calls(text, tools, tool_call_parser)
        if calls and finish_reason["type"] == "stop":  # a stop string cut it
            finish_reason = {"type": "tool_calls"}
        return calls or None, said, finish_reason

    def _process_logprobs_tokens(self, logprobs: Any, use_token_index: bool = False) -> Any:
        # A chunk may have several tokens. Upstream gives each of them the first one's text.
        return super()._process_logprobs_tokens(logprobs, use_token_index=True)

    async def _generate_chat_stream(
        self, adapted_request: Any, request: Any, raw_request: Any
    ) -> AsyncGenerator[str, None]:
        del raw_request
        exchange: Any = self.tokenizer_manager
        args = exchange.server_args
        reasons = (
            args.reasoning_parser is not None
            and request.separate_reasoning
            and self._get_reasoning_from_request(request)
        )
        stream = ChatStream(request, args, reasons=reasons)
        outputs = exchange.generate_request(adapted_request)
        async for chunk in stream.of(outputs, self._process_streaming_logprobs):
            yield chunk
        yield "data: [DONE]\n\n"


def token_name(token: int) -> str:
    """vLLM's name of a token by its id."""
    return f"token_id:{token}"
