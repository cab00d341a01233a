"""Reads prompts from a file or standard input: one per line, as plain text or as JSON objects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from enginepool.errors import InvalidRequest

KINDS = ("prompt", "input_ids", "messages")
_FIELDS = (*KINDS, "sampling_params")


class Format(StrEnum):
    """How prompts come in and results go out."""

    TEXT = "text"
    JSONL = "jsonl"


@dataclass(frozen=True)
class PromptLine:
    """One prompt: text, token ids or a conversation, with sampling parameters of its own.

    Attributes:
        kind: Which of `KINDS` the value is.
    """

    kind: str
    value: Any
    sampling_params: dict[str, Any] | None = None


def decode(lines: Iterable[bytes], source: str) -> Iterator[str]:
    """Decode lines as UTF-8, in every locale.

    Raises:
        InvalidRequest: The error has `source` and the line's number.
    """
    for number, line in enumerate(lines, start=1):
        try:  # editors on Windows begin a file with a byte order mark
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequest(
                f"{source}, line {number}: {error}; prompts must be in UTF-8"
            ) from None


def read_text(lines: Iterable[str]) -> list[PromptLine]:
    """Read one prompt per line; empty lines are skipped."""
    texts = (line.rstrip("\r\n") for line in lines)
    return [PromptLine("prompt", text) for text in texts if text.strip()]


def read_jsonl(lines: Iterable[str], source: str) -> list[PromptLine]:
    """Read one JSON object per line, with exactly one of `prompt`, `input_ids` and `messages`.

    Raises:
        InvalidRequest: The error has `source` and the line's number.
    """
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                prompts.append(_parse(json.loads(line)))
            except ValueError as error:
                raise InvalidRequest(f"{source}, line {number}: {error}") from None
    return prompts


def _parse(found: Any) -> PromptLine:
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, got {found!r}")
    unknown = [name for name in found if name not in _FIELDS]
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}; known are {', '.join(_FIELDS)}")
    kinds = [kind for kind in KINDS if kind in found]
    if len(kinds) != 1:
        raise ValueError(f"expected exactly one of {', '.join(KINDS)}, got {kinds or 'none'}")
    params = found.get("sampling_params")
    if params is not None and not isinstance(params, dict):
        raise ValueError(f"sampling_params: expected an object, got {params!r}")
    return PromptLine(kinds[0], found[kinds[0]], params)
