"""Standard output of the command line. An output that cannot be written is an error."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any


class OutputLost(Exception):
    """Raised when standard output is closed or full, or has no reader.

    Attributes:
        unread: Whether the program that read the output has ended, such as `head`. That is no
            error.
    """

    def __init__(self, error: OSError) -> None:
        reason = "it is closed" if error.errno == errno.EBADF else error.strerror
        super().__init__(f"standard output: {reason}")
        self.unread = isinstance(error, BrokenPipeError)


class _Output(io.FileIO):
    """Standard output. If it cannot be written, it raises OutputLost."""

    _lost = False

    def write(self, data: Any) -> int:
        if self._lost:  # at exit Python writes the rest of the buffer, and would print an error
            return len(data)
        try:
            return super().write(data)
        except OSError as error:
            self._lost = True
            raise OutputLost(error) from None


def engine_line(engine: dict[str, Any]) -> str:
    """A line about an engine that serves, from its part of `stats()`."""
    return (
        f"engine {engine['engine_index']} on {engine['platform']} device "
        f"{engine['devices'][0]}: built in {engine['build_seconds']:.1f} s, "
        f"warmed up in {engine['warmup_seconds']:.1f} s"
    )


def watch_output() -> None:
    """From now on `print` raises OutputLost if its text cannot be written."""
    old: Any = sys.stdout
    if old is None:  # closed: a file that cannot be written replaces it
        raw = _Output(os.open(os.devnull, os.O_RDONLY), "wb")
        options: dict[str, Any] = {"encoding": "utf-8"}
    else:
        raw = _Output(old.fileno(), "wb", closefd=False)
        options = {
            "encoding": old.encoding,
            "line_buffering": old.line_buffering,
            "write_through": old.write_through,
        }
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), errors="backslashreplace", **options)


def check_output() -> None:
    """Raise OutputLost if standard output cannot even take an empty text. Commands call it before
    their work."""
    raw = getattr(sys.stdout.buffer, "raw", None)
    if isinstance(raw, _Output):
        raw.write(b"")
