"""The server's log: the line of each request, and the thread that writes lines to standard error.

With a full disk, a closed pipe or a reader that does not read, lines are lost and the server goes
on.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from enginepool.logs import logger
from enginepool.serve import request_id
from enginepool.serve.record import ExchangeRecord

KEPT = 10_000  # lines that wait to be written; further lines are lost and counted
_END_SECONDS = 2.0
# Limits of a line, for what clients send.
_LONGEST = 500  # characters of an error, or a path
_LONGEST_RID = 100
_LONGEST_PROMPT = {str: 2000, list: 100}  # characters, and token ids
_MOST = 10  # prompts, and requests' ids


def log_exchange(record: ExchangeRecord, *, prompts: bool) -> None:
    """Log one request. Prompts are included only if `prompts` says so."""
    about: dict[str, Any] = {
        "path": record.path[:_LONGEST],
        "status": record.status,
        "outcome": record.outcome,
    }
    if (one := request_id.current()) is not None:
        about["request_id"] = one
    if record.seconds is not None:
        about["seconds"] = round(record.seconds, 4)
    if outputs := record.outputs:
        first = [output for output in outputs if output.sample_index == 0]  # one per prompt
        about |= {
            "ids": _some(dict.fromkeys(output.rid for output in outputs), {str: _LONGEST_RID}),
            "engines": sorted({o.engine_index for o in outputs if o.engine_index is not None}),
            "prompt_tokens": sum(output.prompt_tokens for output in first),
            "completion_tokens": sum(output.completion_tokens for output in outputs),
        }
        if prompts:
            about["prompts"] = _some((output.prompt for output in first), _LONGEST_PROMPT)
    if record.first_output_seconds is not None:
        about["first_output_seconds"] = round(record.first_output_seconds, 4)
    if record.error is not None:
        about["error"] = record.error[:_LONGEST]
    logger().info("enginepool.request", **about)


def _some(values: Iterable[str | list[int]], longest: Mapping[type, int]) -> list[Any]:
    """The first values, each cut to the longest of its type, and how many are left out."""
    every = list(values)
    some: list[Any] = []
    for value in every[:_MOST]:
        left = len(value) - longest[type(value)]
        some.append(value if left <= 0 else f"{value[: longest[type(value)]]}… and {left} more")
    if len(every) > _MOST:
        some.append(f"… and {len(every) - _MOST} more")
    return some


class LogLines:
    """The file that structlog's WriteLogger writes to. `write` never waits and never raises.

    Args:
        descriptor: The descriptor of the file; it is duplicated. None discards all lines.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = None if descriptor is None else os.dup(descriptor)
        self._lines: queue.Queue[str | None] = queue.Queue(KEPT)
        self._lost = 0
        self._lock = threading.Lock()
        # A daemon: a write that waits for a reader may never end, and must not hold up the process.
        self._thread = threading.Thread(target=self._run, name="enginepool-log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            self._lose(1)

    def flush(self) -> None:
        """Do nothing: lines are written as they come."""

    def close(self, timeout: float = _END_SECONDS) -> None:
        """Wait up to `timeout` seconds for lines that are not written yet."""
        try:
            self._lines.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _run(self) -> None:
        while (text := self._lines.get()) is not None:
            if not self._write(text):
                self._lose(1)
            elif lost := self.take_lost():
                about = {"event": "enginepool.log_lines_lost", "level": "warning", "lines": lost}
                if not self._write(json.dumps(about) + "\n"):
                    self._lose(lost)
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _write(self, text: str) -> bool:
        if self._descriptor is None:
            return False
        data = text.encode(errors="backslashreplace")
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            return False
        return True

    def _lose(self, count: int) -> None:
        with self._lock:
            self._lost += count

    def take_lost(self) -> int:
        """How many lines could not be written since this was last asked."""
        with self._lock:
            lost, self._lost = self._lost, 0
        return lost
