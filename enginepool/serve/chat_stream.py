"""The chunks of a chat's stream, from what its outputs have so far.

Reaches into upstream's parsers of reasoning and of tool calls: what they are fed, and when.

What breaks: In upstream's own stream of several answers only the last one ends, if usage is asked
for; calls end as "stop"; with `logprobs` tokens come twice, or not at all; where the text of
several tokens comes at once, calls and the text before them are lost, and so is a call without
arguments.
Why: It expects one answer, and one token a chunk.
Remove when: Its stream says of every answer what its reply says.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Collection, Iterator
from typing import Any

from sgl_jax.srt.entrypoints.openai.protocol import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    ChoiceLogprobs,
    DeltaMessage,
    FunctionResponse,
    ToolCall,
)
from sgl_jax.srt.entrypoints.openai.usage_processor import UsageProcessor
from sgl_jax.srt.function_call.function_call_parser import FunctionCallParser
from sgl_jax.srt.reasoning_parser import ReasoningParser

from enginepool.logs import logger
from enginepool.serve.openai_models import ChatBody

# A parser looks at a call from its beginning again whenever it is fed: with this share of it more.
_MORE = 1 / 16
# Around a call, as all of upstream's parsers have it; some under a name of their own, or none.
_TAGS = ("<tool_call>", "</tool_call>")


class Markers:
    """Cuts a text that grows where one of these words begins and ends."""

    def __init__(self, words: Collection[str | None]) -> None:
        self.words = {stripped for word in words if word and (stripped := word.strip())}
        self._cut = re.compile(f"({'|'.join(map(re.escape, sorted(self.words)))})")
        self._held = ""

    def pieces(self, more: str, *, last: bool) -> list[str]:
        """What there is, without an end that may become a word."""
        text = self._held + more
        if not self.words:
            return [text] if text else []
        longest = max(map(len, self.words))
        begun = [
            size
            for size in range(1, min(longest, 1 + len(text)))
            if any(word.startswith(text[-size:]) and word != text[-size:] for word in self.words)
        ]
        kept = len(text) if last or not begun else len(text) - max(begun)
        self._held = text[kept:]
        return [piece for piece in self._cut.split(text[:kept]) if piece]


class Calls:
    """Text and calls of one answer."""

    def __init__(self, tools: Any, parser: str) -> None:
        self._make = lambda: FunctionCallParser(tools, parser)
        self._parser = self._make()
        detector: Any = self._parser.detector
        self._markers = Markers((*_TAGS, detector.bot_token, detector.eot_token))
        self._waiting = ""
        self._fed = 0  # since the last marker or text
        self._whole = self._text = ""
        self._told: list[tuple[str, str]] = []  # name and arguments of each call
        self._places: dict[int, int] = {}  # in that list, by the parser's own number

    @property
    def any(self) -> bool:
        return bool(self._told)

    def of(self, more: str, *, last: bool) -> Iterator[DeltaMessage]:
        self._whole += more
        for piece in self._markers.pieces(more, last=last):
            if marker := piece in self._markers.words:
                yield from self._feed()
                self._fed = 0
            self._waiting += piece
            if marker or len(self._waiting) > self._fed * _MORE:
                yield from self._feed()
        if last:
            yield from self._feed()
            yield from self._rest()

    def _feed(self) -> Iterator[DeltaMessage]:
        """The parser gives one thing at a time."""
        text, self._waiting = self._waiting, ""
        self._fed += len(text)
        while text is not None:
            said, items = self._parser.parse_stream_chunk(text)
            if said:
                self._text, self._fed = self._text + said, 0
                yield DeltaMessage(content=said)
            for item in items:
                yield from self._told_of(item.tool_index, item.name, item.parameters or "")
            text = "" if said or items else None

    def _told_of(self, number: int, name: str | None, arguments: str) -> Iterator[DeltaMessage]:
        if name:
            self._places[number] = len(self._told)
            self._told.append((name, arguments))
            yield _call(len(self._told) - 1, name, arguments)
        elif arguments and number in self._places:
            place = self._places[number]
            self._told[place] = (self._told[place][0], self._told[place][1] + arguments)
            yield _call(place, None, arguments)

    def _rest(self) -> Iterator[DeltaMessage]:
        """What is only found when the whole is looked at."""
        parser = self._make()
        if not parser.has_tool_call(self._whole):
            if self._whole.startswith(self._text) and (left := self._whole[len(self._text) :]):
                yield DeltaMessage(content=left)
            return
        try:
            _, calls = parser.parse_non_stream(self._whole)
            found = [(call.name or "", _as_streamed(call.parameters)) for call in calls]
        except Exception as error:  # over what a model has written
            logger().warning("enginepool.tool_calls", error=repr(error))
            return
        for place, (name, arguments) in enumerate(found):
            if place == len(self._told):
                self._told.append((name, arguments))
                yield _call(place, name, arguments)
                continue
            told_name, told = self._told[place]
            if told_name == name and arguments.startswith(told) and arguments != told:
                self._told[place] = name, arguments
                yield _call(place, None, arguments[len(told) :])


class Reasoning:
    """Reasoning of one answer, and what comes after it."""

    def __init__(self, parser: str, *, stream: bool) -> None:
        self._parser = ReasoningParser(parser, stream)
        detector = self._parser.detector
        words = detector.think_start_token, detector.think_end_token, detector.tool_start_token
        self._markers = Markers(words)

    def of(self, more: str, *, last: bool) -> Iterator[tuple[str, str]]:
        """Reasoning and text, of which one is empty."""
        for piece in self._markers.pieces(more, last=last):
            thought, said = self._parser.parse_stream_chunk(piece)
            yield self._without_begin(thought), said
        detector = self._parser.detector
        if last and (left := detector._buffer):
            yield (self._without_begin(left), "") if detector._in_reasoning else ("", left)

    def _without_begin(self, thought: str) -> str:
        return thought.replace(self._parser.detector.think_start_token, "")


class _Answer:
    """What was sent of one answer.

    Attributes:
        logprobs: For the next chunk.
    """

    def __init__(self, calls: Calls | None, reasoning: Reasoning | None) -> None:
        self.calls, self._reasoning = calls, reasoning
        self._text = ""
        self._tokens = 0
        self.logprobs: list[Any] = []

    def of(self, text: str, *, last: bool) -> Iterator[DeltaMessage]:
        more, self._text = text[len(self._text) :], text
        if self._reasoning is None:
            yield from self._said(more, last=last)
            return
        for thought, said in self._reasoning.of(more, last=last):
            if thought:
                yield DeltaMessage(reasoning_content=thought)
            if said:
                yield from self._said(said, last=False)
        yield from self._said("", last=last)

    def take(self, output: dict[str, Any], logprobs: Any) -> None:
        """The log-probabilities of what is new."""
        since, self._tokens = self._tokens, len(output["output_ids"])
        if since < self._tokens:
            self.logprobs += logprobs(output, since).content

    def _said(self, more: str, *, last: bool) -> Iterator[DeltaMessage]:
        if self.calls is not None:
            yield from self.calls.of(more, last=last)
        elif more:
            yield DeltaMessage(content=more)


class ChatStream:
    """
    Args:
        reasons: Whether the answers begin with reasoning that is to be told apart.
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
            logprobs: Makes OpenAI's of an output, from a token on.
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
            answer = self._answers[index] = self._begun()
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

    def _begun(self) -> _Answer:
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


def _call(place: int, name: str | None, arguments: str) -> DeltaMessage:
    """The first of a call has its name, and a new id."""
    one = None if name is None else f"call_{uuid.uuid4().hex[:24]}"
    function = FunctionResponse(name=name, arguments=arguments)
    return DeltaMessage(tool_calls=[ToolCall(id=one, index=place, function=function)])


def _as_streamed(arguments: str) -> str:
    """As the parser writes them in a stream: JSON in ASCII."""
    return json.dumps(json.loads(arguments or "{}"))
