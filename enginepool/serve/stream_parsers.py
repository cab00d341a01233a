"""Finds calls and reasoning in a text that grows.

Reaches into upstream's parsers of tool calls and of reasoning: what they are fed, and when.

What breaks: If the text of several tokens comes at once, calls and the text before them are lost. A
call without arguments is lost, with all later calls. A part of a call of an unknown tool comes as
text. For every token a call is parsed from its beginning.
Why: The parsers expect one token per piece.
Remove when: They find the same in pieces of a text as in the whole text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterator
from typing import Any

from sgl_jax.srt.entrypoints.openai.protocol import DeltaMessage, FunctionResponse, ToolCall
from sgl_jax.srt.function_call.function_call_parser import FunctionCallParser
from sgl_jax.srt.reasoning_parser import ReasoningParser

from enginepool.dispatch.thinking import Thinking
from enginepool.logs import logger
from enginepool.serve.rendering import Rendering

# A parser reads a call from its beginning whenever it is fed. So it is fed when the call has grown
# by this share.
_MORE = 1 / 16
# The usual marks around a call. Some of upstream's parsers have others, or no attributes for them.
CALL_MARK, _CALL_END = "<tool_call>", "</tool_call>"
_LISTED = re.compile(r'\s*\[\s*(?=\{\s*"name"\s*:)')
_CALL = re.compile(r'[\s,}]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:\s*')
_DECODER = json.JSONDecoder()


class Markers:
    """Cuts a growing text at these words."""

    def __init__(self, words: Collection[str | None]) -> None:
        self.words = {stripped for word in words if word and (stripped := word.strip())}
        self._cut = re.compile(f"({'|'.join(map(re.escape, sorted(self.words)))})")
        self._held = ""

    def pieces(self, more: str, *, last: bool) -> list[str]:
        """The pieces of the text that is new. An end that may become a word is kept for the next
        call."""
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
    """Separates the text and the calls of one answer. Without any call, its marks are text."""

    def __init__(self, tools: Any, parser: str) -> None:
        self._make = lambda: FunctionCallParser(tools, parser)
        self._parser = self._make()
        self._names = {tool.function.name for tool in tools}
        detector: Any = self._parser.detector
        self._begins = {CALL_MARK, detector.bot_token.strip()}
        self._markers = Markers((*self._begins, _CALL_END, detector.eot_token))
        self._waiting = ""
        self._fed = 0  # since the last marker or text
        self._marked = ""  # the first mark and what follows it
        self._called = False  # whether the parser has found a call since the last mark
        self._sent: list[tuple[str, str]] = []  # name and arguments of each call
        self._open: int | None = None  # the place of the call that is being sent
        self._places: dict[int, int] = {}  # in that list, by the parser's own number

    @property
    def any(self) -> bool:
        return bool(self._sent)

    def of(self, more: str, *, last: bool) -> Iterator[DeltaMessage]:
        for piece in self._markers.pieces(more, last=last):
            if not self._marked and piece not in self._begins:
                yield DeltaMessage(content=piece)
                continue
            if marker := piece in self._markers.words:
                yield from self._feed()
                self._fed = 0
                self._called = self._called and piece not in self._begins
            self._marked += piece
            self._waiting += piece
            if marker or len(self._waiting) > self._fed * _MORE:
                yield from self._feed()
        if last and self._marked:
            yield from self._feed()
            yield from self._rest()

    def _feed(self) -> Iterator[DeltaMessage]:
        """Feed the parser the text that waits. It returns text and calls one by one."""
        text, self._waiting = self._waiting, ""
        self._fed += len(text)
        for _ in range(2 + len(self._marked)):
            try:
                said, items = self._parser.parse_stream_chunk(text)
            except Exception as error:  # the parser does not take the model's text
                logger().warning("enginepool.tool_calls", error=type(error).__name__)
                return
            if said and self._called:  # otherwise it may be the end of what is no call
                yield from self._end_call()
                self._fed = 0
                yield DeltaMessage(content=said)
            for item in items:
                yield from self._call_deltas(item.tool_index, item.name, item.parameters or "")
            if not (said or items):
                return
            text = ""

    def _call_deltas(self, number: int, name: str | None, arguments: str) -> Iterator[DeltaMessage]:
        if name:
            yield from self._end_call()
            self._places.pop(number, None)
            if name not in self._names:
                return
            self._called = True
            self._places[number] = self._open = len(self._sent)
            self._sent.append((name, arguments))
            yield _call(len(self._sent) - 1, name, arguments)
        elif arguments and number in self._places:
            place = self._places[number]
            self._sent[place] = (self._sent[place][0], self._sent[place][1] + arguments)
            yield _call(place, None, arguments)

    def _end_call(self) -> Iterator[DeltaMessage]:
        """The end of the last call's arguments, if the parser has not sent it: text or another call
        comes next. Some parsers omit `{}` for a call without arguments, or the last brace."""
        place, self._open = self._open, None
        if place is not None and not _is_json(self._sent[place][1]):
            for name, forms in self._found()[place : place + 1]:
                yield from self._left(place, name, forms)

    def _rest(self) -> Iterator[DeltaMessage]:
        """Calls that the parser finds only in the whole answer, or text."""
        found = self._found()
        if not (found or self._sent):
            yield DeltaMessage(content=self._marked)
        for place, (name, forms) in enumerate(found):
            if place < len(self._sent):
                yield from self._left(place, name, forms)
            else:
                self._sent.append((name, forms[0]))
                yield _call(place, name, forms[0])

    def _found(self) -> list[tuple[str, list[str]]]:
        """The name and the arguments of each call in the text so far."""
        try:
            _, calls = self._make().parse_non_stream(self._marked)
            return [(call.name or "", _forms(call.parameters or "{}")) for call in calls]
        except Exception as error:
            logger().warning("enginepool.tool_calls", error=type(error).__name__)
            return []

    def _left(self, place: int, name: str, forms: list[str]) -> Iterator[DeltaMessage]:
        """The arguments of a call that were not sent."""
        told_name, told = self._sent[place]
        left = [form[len(told) :] for form in forms if form.startswith(told)]
        if told_name == name and left and left[0]:
            self._sent[place] = name, told + left[0]
            yield _call(place, None, left[0])


def cut_calls(text: str, tools: Any, parser: str) -> tuple[list[ToolCall], str]:
    """The calls and the text of an answer that was cut."""
    detector: Any = FunctionCallParser(tools, parser).detector
    if not detector.supports_structural_tag():
        listed = _LISTED.match(text)
        if listed and (calls := _cut_list(text, listed.end())):
            return calls, ""
    calls: list[ToolCall] = []
    said = ""
    # A parser finds the parts of an incomplete call only if it is fed in pieces, as in a stream.
    grown = Calls(tools, parser)
    deltas = [delta for piece in text for delta in grown.of(piece, last=False)]
    for delta in (*deltas, *grown.of("", last=True)):
        said += delta.content or ""
        for call in delta.tool_calls or ():
            if call.index == len(calls):
                calls.append(call)
            else:
                function = calls[call.index or 0].function
                function.arguments = (function.arguments or "") + (call.function.arguments or "")
    return calls, said


def _cut_list(text: str, place: int) -> list[ToolCall]:
    """The calls of a JSON list that was cut, as models without a form of their own write it."""
    calls: list[ToolCall] = []
    while (begun := _CALL.match(text, place)) is not None:
        name, start = json.loads(begun[1]), begun.end()
        try:
            _, place = _DECODER.raw_decode(text, start)
        except ValueError:
            place = len(text)
        calls += _call(len(calls), name, text[start:place]).tool_calls or ()
    return calls


def marks(parser: str) -> tuple[str, str]:
    """The marks before and after a model's thinking."""
    detector = ReasoningParser(parser).detector
    return detector.think_start_token.strip(), detector.think_end_token.strip()


def thinking_of(parser: str, tokenizer: Rendering, prompt_end: str) -> Thinking:
    """How an answer to this prompt begins and ends its thinking."""
    begin, end = marks(parser)
    begun = ReasoningParser(parser).detector._in_reasoning or prompt_end.endswith(begin)
    ids = tokenizer.encode(begin, add_special_tokens=False)
    return Thinking(tuple(ids), end, begun, tokenizer.token_text)


class Reasoning:
    """Separates the reasoning and the text of one answer."""

    def __init__(self, parser: str, *, stream: bool) -> None:
        self._parser = ReasoningParser(parser, stream)
        detector = self._parser.detector
        words = detector.think_start_token, detector.think_end_token, detector.tool_start_token
        self._markers = Markers(words)
        self._thinks = self._thought = self._said = False  # so far

    def of(self, more: str, *, last: bool) -> Iterator[tuple[str, str]]:
        """Pairs of reasoning and text. One of the two is empty."""
        detector = self._parser.detector
        for piece in self._markers.pieces(more, last=last):
            self._thinks |= detector._in_reasoning
            yield self._pair(*self._parser.parse_stream_chunk(piece))
        if last and (left := detector._buffer):
            yield self._pair(*((left, "") if detector._in_reasoning else ("", left)))

    def _pair(self, thought: str, said: str) -> tuple[str, str]:
        """The pair without the begin mark and without whitespace after a mark, as in a whole
        reply."""
        thought = thought.replace(self._parser.detector.think_start_token, "")
        thought = thought if self._thought else thought.lstrip()
        said = said.lstrip() if self._thinks and not self._said else said
        self._thought, self._said = self._thought or bool(thought), self._said or bool(said)
        return thought, said


def _call(place: int, name: str | None, arguments: str) -> DeltaMessage:
    """A piece of a call. The first piece has its name and a new id."""
    one = None if name is None else f"call_{uuid.uuid4().hex[:24]}"
    function = FunctionResponse(name=name, arguments=arguments)
    return DeltaMessage(tool_calls=[ToolCall(id=one, index=place, function=function)])


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _forms(arguments: str) -> list[str]:
    """The two forms in which parsers write arguments. In a stream they are JSON in ASCII, in a
    whole reply they are unchanged."""
    return [json.dumps(json.loads(arguments)), arguments]
