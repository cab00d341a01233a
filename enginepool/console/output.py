"""Standard output of the command line. Output that cannot be written is an error."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any


class OutputLost(Exception):
    """Raised by whatever writes to standard output, when that is closed or full, or nobody reads.

    Attributes:
        unread: Whether its reader has left, as `head` does; no mistake of anybody's.
    """

    def __init__(self, error: OSError) -> None:
        reason = "it is closed" if error.errno == errno.EBADF else error.strerror
        super().__init__(f"standard output: {reason}")
        self.unread = isinstance(error, BrokenPipeError)


class _Output(io.FileIO):
    """Standard output, whose errors are told from those of other files."""

    _lost = False

    def write(self, data: Any) -> int:
        if self._lost:  # Python tries what is left in the buffer again at exit, and would complain
            return len(data)
        try:
            return super().write(data)
        except OSError as error:
            self._lost = True
            raise OutputLost(error) from None


def engine_line(engine: dict[str, Any]) -> str:
    """What is said of an engine that serves now, from its part of `stats()`."""
    return (
        f"engine {engine['engine_index']} on {engine['platform']} device "
        f"{engine['devices'][0]}: built in {engine['build_seconds']:.1f} s, "
        f"warmed up in {engine['warmup_seconds']:.1f} s"
    )


def watch_output() -> None:
    """Let everything that is printed from now on raise OutputLost where it cannot be written."""
    old: Any = sys.stdout
    if old is None:  # closed: what is open for reading only stands for it
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
    """Raise OutputLost before the work, as far as that can be seen by writing nothing."""
    raw = getattr(sys.stdout.buffer, "raw", None)
    if isinstance(raw, _Output):
        raw.write(b"")
