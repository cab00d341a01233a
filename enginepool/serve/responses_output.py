"""Makes the reply of `/v1/responses` from a chat's: whole, or as the events of a stream."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from enginepool.dispatch.request import Call
from enginepool.serve.openai_models import ChatBody
from enginepool.serve.responses_models import ResponsesBody, ResponsesReply
from enginepool.serve.stream_parsers import CALL_MARK

_DATA, _DONE = "data: ", "[DONE]"
_PREFIXES = {"message": "msg_", "function_call": "fc_", "reasoning": "rs_"}


class Answer:
    """The response to one request, as every event and the reply show it.

    Args:
        tokens: Counts the tokens of a text.

    Attributes:
        think_end: The mark after the thinking of the answer. None if there is no thinking.
    """

    def __init__(
        self, body: ResponsesBody, chat: ChatBody, call: Call, tokens: Callable[[str], int]
    ) -> None:
        self._request, self._tokens = call.requests[0], tokens
        thinking = self._request.thinking
        self.think_end = None if thinking is None else thinking.end
        self.items: list[dict[str, Any]] = []
        self._about: dict[str, Any] = {
            "id": self._request.shown_rid,
            "created_at": int(time.time()),
            "model": body.model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": chat.temperature,
            "top_p": chat.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "tools": body.tools,
            "tool_choice": body.tool_choice or ("auto" if body.tools else "none"),
            "parallel_tool_calls": body.parallel_tool_calls,
            "text": body.text,
            "truncation": body.truncation,
            "metadata": body.metadata,
        }

    def begin(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Add an item to the output."""
        one = f"{_PREFIXES[kind]}{uuid.uuid4().hex}"
        self.items.append({"id": one, "type": kind, "status": "in_progress", **fields})
        return self.items[-1]

    def begun(self) -> dict[str, Any]:
        """The response before its output."""
        return self._response(status="in_progress", output=[])

    def ended(self, error: dict[str, Any] | None = None) -> dict[str, Any]:
        """The response at its end."""
        reason = self._reason
        status = {"length": "incomplete", "abort": "cancelled"}.get(reason, "completed")
        return self._response(
            status="failed" if error else status,
            error=error,
            incomplete_details={"reason": "max_output_tokens"} if reason == "length" else None,
            output=self.items,
            usage=self._usage(),
        )

    def _response(self, **fields: Any) -> dict[str, Any]:
        return ResponsesReply(**self._about, **fields).model_dump(by_alias=True)

    @property
    def _reason(self) -> str:
        return (self._request.finish_reason or {"type": "abort"})["type"]

    def end_item(self, item: dict[str, Any], *, last: bool = True) -> None:
        cut = last and self._reason in ("length", "abort")
        item["status"] = "incomplete" if cut else "completed"

    def after_thinking(self, logprobs: list[Any]) -> list[Any]:
        """The log-probabilities of the tokens after the thinking. The others belong to no
        message."""
        mark, seen = self.think_end, ""
        if mark is None:
            return logprobs
        for place, one in enumerate(logprobs, 1):
            seen = seen[-len(mark) :] + one["token"]
            if mark in seen:
                return logprobs[place:]
        return logprobs

    def whole(self, reply: dict[str, Any]) -> dict[str, Any]:
        """The response to a chat's whole reply."""
        (choice,) = reply["choices"]
        message: dict[str, Any] = defaultdict(lambda: None, choice["message"])
        if message["reasoning_content"]:
            self.begin("reasoning", summary=[], content=_reasoning(message["reasoning_content"]))
        if message["content"] is not None or not (message["tool_calls"] or self.items):
            logprobs = self.after_thinking(_logprobs(choice))
            if message["tool_calls"]:
                logprobs = _before_calls(logprobs)
            text = _text(message["content"] or "", logprobs)
            self.begin("message", role="assistant", content=[text])
        for call in message["tool_calls"] or ():
            self.begin("function_call", call_id=call["id"], **_called(call))
        for item in self.items:
            self.end_item(item, last=item is self.items[-1])
        return self.ended()

    def _usage(self) -> dict[str, Any]:
        request = self._request
        thought = [
            part["text"] for i in self.items if i["type"] == "reasoning" for part in i["content"]
        ]
        return {
            "input_tokens": len(request.input_ids),
            "input_tokens_details": {"cached_tokens": request.cached_tokens or 0},
            "output_tokens": len(request.output_ids),
            "output_tokens_details": {"reasoning_tokens": sum(map(self._tokens, thought))},
            "total_tokens": len(request.input_ids) + len(request.output_ids),
        }


class Events:
    """Makes OpenAI's events from the chunks of a chat's stream."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._number = -1
        self._item: dict[str, Any] | None = None  # that is being written
        # The log-probabilities before the first text. None after it, or without thinking.
        self._held: list[Any] | None = None if answer.think_end is None else []

    async def of(self, pieces: AsyncIterable[Any]) -> AsyncIterator[str]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._answer.begun())
        error = None
        async for piece in pieces:
            data = str(piece).removeprefix(_DATA).strip()
            if not data or data == _DONE:
                continue
            chunk = json.loads(data)
            error = chunk.get("error", error)
            for choice in chunk.get("choices", ()):
                for event in self._chunk(choice):
                    yield event
        if not self._answer.items and error is None:  # no chunk had content
            for event in self._said("", self._after_thinking([], said=True)):
                yield event
        for event in self._ended(last=True):
            yield event
        ended = self._answer.ended(error and {name: error[name] for name in ("code", "message")})
        yield self._event(f"response.{ended['status']}", response=ended)
        if error is not None:  # OpenAI's client raises this event
            about = {name: error[name] for name in ("code", "message", "param")}
            yield self._event("error", **about, error=error)

    def _chunk(self, choice: dict[str, Any]) -> Iterator[str]:
        delta: dict[str, Any] = defaultdict(lambda: None, choice["delta"])
        if delta["reasoning_content"]:
            yield from self._begun("reasoning", summary=[], content=_reasoning(""))
            yield self._grown("reasoning_text", delta["reasoning_content"])
        logprobs = self._after_thinking(_logprobs(choice), said=bool(delta["content"]))
        if delta["content"] or (logprobs and self._belongs_to_message(delta)):
            yield from self._said(delta["content"] or "", logprobs)
        for call in delta["tool_calls"] or ():
            if call["id"] is not None:
                yield from self._ended()
                empty = {"name": call["function"]["name"], "arguments": ""}
                yield from self._begun("function_call", call_id=call["id"], **empty)
            if arguments := call["function"]["arguments"]:
                assert self._item is not None
                self._item["arguments"] += arguments
                yield self._of_item("response.function_call_arguments.delta", delta=arguments)

    def _said(self, text: str, logprobs: list[Any]) -> Iterator[str]:
        """Text of a message."""
        yield from self._begun("message", role="assistant", content=[_text("", [])])
        assert self._item is not None
        self._item["content"][0]["logprobs"] += logprobs
        yield self._grown("output_text", text, logprobs=logprobs)

    def _after_thinking(self, logprobs: list[Any], *, said: bool) -> list[Any]:
        """Hold log-probabilities back until a text says where the thinking has ended."""
        if self._held is None:
            return logprobs
        self._held += logprobs
        if not said:
            return []
        held, self._held = self._held, None
        return self._answer.after_thinking(held)

    def _belongs_to_message(self, delta: Mapping[str, Any]) -> bool:
        """Whether log-probabilities without text belong to the message."""
        if delta["reasoning_content"] or delta["tool_calls"]:
            return False
        return not self._answer.items or (self._item or {}).get("type") == "message"

    def _begun(self, kind: str, **fields: Any) -> Iterator[str]:
        """Begin an item of this kind, unless one is being written."""
        if self._item is not None and self._item["type"] == kind:
            return
        yield from self._ended()
        self._item = self._answer.begin(kind, **fields)
        empty = self._item | ({"content": []} if "content" in fields else {})
        yield self._event("response.output_item.added", output_index=self._index(), item=empty)
        if "content" in fields:
            part = self._item["content"][0]
            yield self._of_item("response.content_part.added", content_index=0, part=part)

    def _grown(self, kind: str, text: str, **fields: Any) -> str:
        assert self._item is not None
        self._item["content"][0]["text"] += text
        return self._of_item(f"response.{kind}.delta", content_index=0, delta=text, **fields)

    def _ended(self, *, last: bool = False) -> Iterator[str]:
        item = self._item
        if item is None:
            return
        self._answer.end_item(item, last=last)
        if item["type"] == "function_call":
            said = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("response.function_call_arguments.done", **said)
        else:
            (part,) = item["content"]
            said = {k: v for k, v in part.items() if k in ("text", "logprobs")}
            yield self._of_item(f"response.{part['type']}.done", content_index=0, **said)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=self._index(), item=item)
        self._item = None

    def _of_item(self, kind: str, **fields: Any) -> str:
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=self._index(), **fields)

    def _index(self) -> int:
        return len(self._answer.items) - 1

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        event = {"type": kind, "sequence_number": self._number, **fields}
        return f"event: {kind}\ndata: {json.dumps(event)}\n\n"


def _text(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprobs(choice: Mapping[str, Any]) -> list[Any]:
    return (choice.get("logprobs") or {}).get("content") or []


def _before_calls(logprobs: list[Any]) -> list[Any]:
    """The log-probabilities of the tokens before the first call's mark."""
    said, _, _ = "".join(one["token"] for one in logprobs).partition(CALL_MARK)
    ends = itertools.accumulate(len(one["token"]) for one in logprobs)
    return [one for one, end in zip(logprobs, ends, strict=True) if end <= len(said)]


def _reasoning(text: str) -> list[dict[str, Any]]:
    return [{"type": "reasoning_text", "text": text}]


def _called(call: dict[str, Any]) -> dict[str, Any]:
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"] or ""}
