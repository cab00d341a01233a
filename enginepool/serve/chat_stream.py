"""Makes the chunks of a chat's stream from its outputs so far.

Reaches into upstream's serving class: the method that makes chunks is replaced.

What breaks: In upstream's own stream with `include_usage`, only one of several answers gets a
finish reason. An answer with tool calls gets the finish reason "stop". With `logprobs` tokens come
twice, or not at all.
Why: It expects one answer, and one token per chunk.
Remove when: Its stream has the same content as its reply without a stream.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from sgl_jax.srt.entrypoints.openai.protocol import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    ChoiceLogprobs,
    DeltaMessage,
)
from sgl_jax.srt.entrypoints.openai.usage_processor import UsageProcessor

from enginepool.serve.openai_models import ChatBody
from enginepool.serve.stream_parsers import Calls, Reasoning


class _Answer:
    """The part of one answer that was sent.

    Attributes:
        logprobs: The log-probabilities for the next chunk.
    """

    def __init__(self, calls: Calls | None, reasoning: Reasoning | None) -> None:
        self.calls, self._reasoning = calls, reasoning
        self._text = ""
        self._tokens = 0
        self.logprobs: list[Any] = []

    def of(self, text: str, *, last: bool) -> Iterator[DeltaMessage]:
        more, self._text = text[len(self._text) :], text
        if self._reasoning is None:
            yield from self._text_deltas(more, last=last)
            return
        for thought, said in self._reasoning.of(more, last=last):
            if thought:
                yield DeltaMessage(reasoning_content=thought)
            if said:
                yield from self._text_deltas(said, last=False)
        yield from self._text_deltas("", last=last)

    def take(self, output: dict[str, Any], logprobs: Any) -> None:
        """Keep the log-probabilities of new tokens for the next chunk."""
        since, self._tokens = self._tokens, len(output["output_ids"])
        if since < self._tokens:
            self.logprobs += logprobs(output, since).content

    def _text_deltas(self, more: str, *, last: bool) -> Iterator[DeltaMessage]:
        if self.calls is not None:
            yield from self.calls.of(more, last=last)
        elif more:
            yield DeltaMessage(content=more)


class ChatStream:
    """
    Args:
        reasons: Whether the answers begin with reasoning, which gets chunks of its own.
    """

    def __init__(self, body: ChatBody, server_args: Any, *, reasons: bool) -> None:
        self._body, self._args, self._reasons = body, server_args, reasons
        self._created = int(time.time())
        self._answers: dict[int, _Answer] = {}
        self._counts: dict[str, dict[int, int]] = {
            name: {} for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
        }
        self._id = ""

    async def of(self, outputs: AsyncIterator[Any], logprobs: Any) -> AsyncIterator[str]:
        """
        Args:
            logprobs: Makes OpenAI's log-probabilities of an output, from a given token on.
        """
        async for output in outputs:
            for chunk in self._output(output, logprobs):
                yield chunk
        options = self._body.stream_options
        if options is not None and options.include_usage:
            usage = UsageProcessor.calculate_streaming_usage(
                **self._counts,
                n_choices=self._body.n,
                enable_cache_report=self._args.enable_cache_report,
            )
            yield self._chunk([], usage=usage)

    def _output(self, output: dict[str, Any], logprobs: Any) -> Iterator[str]:
        index, meta = output["index"], output["meta_info"]
        self._id = meta["id"]
        for name, counts in self._counts.items():
            counts[index] = meta[name]
        if (answer := self._answers.get(index)) is None:
            answer = self._answers[index] = self._new_answer()
            yield self._delta(index, DeltaMessage(role="assistant", content=""))
        if self._body.logprobs:
            answer.take(output, logprobs)
        ended = meta["finish_reason"]
        for delta in answer.of(output["text"], last=ended is not None):
            yield self._delta(index, delta, logprobs=_taken(answer))
        if ended is None:
            return
        kind = ended["type"]
        if kind == "stop" and answer.calls is not None and answer.calls.any:
            kind, ended = "tool_calls", {}
        yield self._delta(
            index,
            DeltaMessage(),
            logprobs=_taken(answer),
            finish_reason=kind,
            matched_stop=ended.get("matched"),
        )

    def _new_answer(self) -> _Answer:
        body, args = self._body, self._args
        calls = reasoning = None
        if body.tools and body.tool_choice != "none":
            calls = Calls(body.tools, args.tool_call_parser)
        if self._reasons:
            reasoning = Reasoning(args.reasoning_parser, stream=body.stream_reasoning)
        return _Answer(calls, reasoning)

    def _delta(self, index: int, delta: DeltaMessage, **fields: Any) -> str:
        return self._chunk([ChatCompletionResponseStreamChoice(index=index, delta=delta, **fields)])

    def _chunk(self, choices: list[Any], usage: Any = None) -> str:
        chunk = ChatCompletionStreamResponse(
            id=self._id,
            created=self._created,
            model=self._body.model,
            choices=choices,
            usage=usage,
        )
        return f"data: {chunk.model_dump_json()}\n\n"


def _taken(answer: _Answer) -> ChoiceLogprobs | None:
    content, answer.logprobs = answer.logprobs, []
    return ChoiceLogprobs(content=content) if content else None
