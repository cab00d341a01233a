"""Writes results to standard output, each as soon as it ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, BinaryIO

from enginepool.cli.prompt_file import Format


class ResultLines:
    """Writes results: JSON when they end, text in input order.

    Both are UTF-8 in every locale, like the prompts.

    Args:
        samples: The number of samples of each prompt.
    """

    def __init__(self, stream: BinaryIO, form: Format, samples: Sequence[int]) -> None:
        self._stream, self._form = stream, form
        self._places = ((index, i) for index, n in enumerate(samples) for i in range(n))
        self._next = next(self._places, None)
        self._early: dict[tuple[int, int], str] = {}
        self.total, self.ended, self.tokens = sum(samples), 0, 0

    def add(self, result: dict[str, Any]) -> None:
        meta = result["meta_info"]
        self.ended += 1
        self.tokens += meta["completion_tokens"]
        if self._form is Format.JSONL:
            row = {"prompt_index": meta["prompt_index"], **result}
            self._write(json.dumps(row, ensure_ascii=False))
            return
        self._early[meta["prompt_index"], meta["sample_index"]] = result["text"]
        while self._next in self._early:
            text = self._early.pop(self._next)
            self._next = next(self._places, None)
            self._write(text)

    def rest(self) -> None:
        """Write results that have ended but whose turn has not come, in input order."""
        for place in sorted(self._early):
            self._write(self._early.pop(place))

    def _write(self, line: str) -> None:
        self._stream.write(f"{line}\n".encode("utf-8", "backslashreplace"))
        self._stream.flush()
