"""Brings messages as OpenAI's clients write them into the form that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def as_turns(messages: list[Any]) -> list[Any]:
    """The role `developer` becomes `system`, an assistant's refusal becomes its text, and the
    arguments of a call become a string of JSON."""
    return [_turn(one) if isinstance(one, Mapping) else one for one in messages]


def _turn(message: Mapping[str, Any]) -> Mapping[str, Any]:
    changed: dict[str, Any] = {}
    role, content, calls = (message.get(name) for name in ("role", "content", "tool_calls"))
    if role == "developer":
        changed["role"] = "system"
    if role == "assistant" and isinstance(content, list):
        changed["content"] = [_as_text(part) for part in content]
    if isinstance(calls, list):
        changed["tool_calls"] = [_call(call) for call in calls]
    return {**message, **changed} if changed else message


def _as_text(part: Any) -> Any:
    if isinstance(part, Mapping) and part.get("type") == "refusal":
        other = {name: value for name, value in part.items() if name != "refusal"}
        return {**other, "type": "text", "text": part.get("refusal")}
    return part


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), Mapping):
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}
    return call
