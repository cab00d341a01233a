"""Shows the stage of a start in one line on standard error, if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_PER_SECOND = 4


@contextmanager
def start_line(text: Callable[[], str], wanted: bool) -> Iterator[None]:
    """While the block runs, show what `text` returns, overwritten in place. It is gone at the end.

    Nothing is shown if standard error is no terminal: a pipe, a notebook or a test sees nothing.
    """
    if not wanted or not is_terminal(sys.stderr):
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield
        return
    with Live(
        get_renderable=lambda: Text(text(), no_wrap=True, overflow="ellipsis"),
        console=console,
        refresh_per_second=_PER_SECOND,
        transient=True,
        # Other prints go above the line. A redirected standard output stays as it is.
        redirect_stdout=is_terminal(sys.stdout),
    ):
        yield


def is_terminal(stream: Any) -> bool:
    """Whether a standard stream is a terminal."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # a program's own object that only writes; None; closed
        return False
