"""Turns a body of `/v1/responses` into a chat's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from enginepool.serve.error_replies import Refused
from enginepool.serve.openai_models import ChatBody
from enginepool.serve.responses_models import (
    LOGPROBS,
    FunctionCallItem,
    FunctionOutputItem,
    MessageItem,
    NamedTool,
    ReasoningItem,
    RefusalPart,
    ResponsesBody,
    TextFormat,
    TextPart,
)
from enginepool.values import described

_STATEFUL = ("store", "background", "previous_response_id", "conversation", "prompt")
_SAME = (
    *("temperature", "top_p", "top_k", "seed", "stop", "ignore_eos", "chat_template_kwargs"),
    *("cache_salt", "parallel_tool_calls"),
)


def as_chat(body: ResponsesBody) -> ChatBody:
    """
    Raises:
        Refused: It asks for what only a server that keeps conversations can do.
        RequestValidationError: A value does not fit.
    """
    _check(body)
    given = {name: getattr(body, name) for name in _SAME}
    chat: dict[str, Any] = {
        "model": body.model,
        "messages": _messages(body),
        "stream": body.stream,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": LOGPROBS in body.include,
        "top_logprobs": body.top_logprobs if LOGPROBS in body.include else None,
        "response_format": _format(body.text.format),
        **{name: value for name, value in given.items() if value is not None},
    }
    if body.tools:
        chat["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools
        ]
    if isinstance(body.tool_choice, NamedTool):
        chat["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    elif body.tool_choice is not None:
        chat["tool_choice"] = body.tool_choice
    try:
        return ChatBody(**chat)
    except ValidationError as error:
        raise RequestValidationError(
            [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        ) from None


def _check(body: ResponsesBody) -> None:
    for name in _STATEFUL:
        if value := getattr(body, name):
            raise Refused(
                400, f"{name}={described(value)}: this server keeps no responses; send the whole "
                "conversation as input, and leave it out", param=name,
            )  # fmt: skip
    if body.top_logprobs and LOGPROBS not in body.include:
        raise Refused(
            400, f'top_logprobs={body.top_logprobs} without include=["message.output_text.'
            'logprobs"]', param="top_logprobs",
        )  # fmt: skip
    if body.input == []:
        raise Refused(400, "input=[]: there is no message", param="input")


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """Messages of the chat. An assistant's reasoning, text and calls are separate items of one
    turn."""
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    turn: dict[str, Any] | None = None  # the assistant's turn that further items belong to
    for item in body.input:
        if isinstance(item, FunctionOutputItem):
            turn = None
            output = item.output if isinstance(item.output, str) else _joined(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            turn = None
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _content(item.content)})
        else:
            if turn is None or _follows(turn, item):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add(turn, item)
    return messages


def _follows(turn: dict[str, Any], item: MessageItem | FunctionCallItem | ReasoningItem) -> bool:
    """Whether an item begins a new turn. A turn has one text, and its reasoning comes first."""
    if isinstance(item, MessageItem):
        return bool(turn["content"])
    return isinstance(item, ReasoningItem) and bool(turn["content"] or "tool_calls" in turn)


def _add(turn: dict[str, Any], item: MessageItem | FunctionCallItem | ReasoningItem) -> None:
    if isinstance(item, MessageItem):
        turn["content"] = item.content if isinstance(item.content, str) else _joined(item.content)
    elif isinstance(item, FunctionCallItem):
        called = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": called}
        turn.setdefault("tool_calls", []).append(call)
    elif item.content:
        turn["reasoning_content"] = "".join(part.text for part in item.content)


def _content(content: str | Sequence[TextPart | RefusalPart]) -> Any:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


def _joined(parts: Sequence[TextPart | RefusalPart]) -> str:
    return "".join(part.text for part in parts)


def _format(asked: TextFormat) -> dict[str, Any] | None:
    if asked.type != "json_schema" and asked.schema_ is not None:
        raise Refused(
            400, f"text.format of type {asked.type} with a schema: expected type json_schema",
            param="text",
        )  # fmt: skip
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return {"type": "json_object"}
    if asked.schema_ is None or asked.name is None:
        raise Refused(400, "text.format: json_schema needs name and schema", param="text")
    schema = {"name": asked.name, "schema": asked.schema_, "strict": asked.strict or False}
    return {"type": "json_schema", "json_schema": schema}
