"""A progress bar on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from enginepool.console.start_line import is_terminal
from enginepool.dispatch.request import Call


def show_progress(call: Call, wanted: bool) -> AbstractContextManager[Callable[[], None] | None]:
    """Show a bar for a call; see `progress_bar`."""
    total = len(call.requests)

    def count() -> tuple[int, int]:
        tokens = sum(len(request.output_ids) - request.given for request in call.requests)
        return total - call.remaining, tokens

    return progress_bar(total, count, wanted)


@contextmanager
def progress_bar(
    total: int, count: Callable[[], tuple[int, int]], wanted: bool
) -> Iterator[Callable[[], None] | None]:
    """Show how many outputs have ended, and tokens per second. Yields a function that redraws it.

    Args:
        count: Returns how many outputs have ended, and how many tokens there are.
    """
    if not wanted:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    # On a terminal, other prints go above the bar. A redirected standard output stays as it is.
    shared = is_terminal(sys.stdout)
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=shared) as progress:
        task = progress.add_task("generating", total=total, speed="")

        def tick() -> None:
            elapsed = progress.tasks[0].elapsed or 0.0
            ended, tokens = count()
            speed = f"{tokens / elapsed:.0f} tokens/s" if elapsed else ""
            progress.update(task, completed=ended, speed=speed)

        yield tick
        tick()
