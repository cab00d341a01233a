"""Removes paths, names and values of the environment from what is sent in."""

from __future__ import annotations

import contextlib
import functools
import getpass
import os
import re
import socket
from typing import Any

# An absolute path, but not the end of a URL or of `a/b`. A Python file keeps its own name: that is
# where an error came from.
_PATH = re.compile(r"(?<![\w/.])/[\w.~@+-][^\s'\"`,;:()\[\]<>]*")
# Shorter values and names are words that texts have anyhow.
_LEAST_VALUE, _LEAST_NAME = 8, 4


def scrub(value: Any) -> Any:
    """A copy of the value (dicts, lists and texts) without what must stay on the host."""
    if isinstance(value, dict):
        return {key: scrub(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrub(item) for item in value]
    return _text(value) if isinstance(value, str) else value


def _text(text: str) -> str:
    for found in _values():
        text = text.replace(found, "<environment>")
    text = _PATH.sub(_shortened, text)
    return _names().sub("<name>", text)


def _shortened(match: re.Match[str]) -> str:
    last = match[0].rpartition("/")[2]
    return f"<path>/{last}" if last.endswith(".py") else "<path>"


def _values() -> list[str]:
    """The current values of the environment, longer ones first, because one may be part of another.
    Paths are left out: the pattern for paths removes them and keeps names of Python files."""
    values = {value for value in os.environ.values() if len(value) >= _LEAST_VALUE}
    return sorted((v for v in values if not _PATH.fullmatch(v)), key=len, reverse=True)


@functools.cache
def _names() -> re.Pattern[str]:
    """A pattern of the names of the user and the host."""
    found = {socket.gethostname(), socket.gethostname().partition(".")[0]} - {"localhost"}
    with contextlib.suppress(OSError, KeyError):  # a user without a name, as in a container
        found.add(getpass.getuser())
    words = "|".join(
        re.escape(name) for name in sorted(found, key=len, reverse=True) if len(name) >= _LEAST_NAME
    )
    return re.compile(rf"(?<!\w)(?:{words})(?!\w)" if words else r"(?!)")
