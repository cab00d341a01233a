"""A progress bar for a call, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from enginepool.requests.request import Call


@contextmanager
def show_progress(call: Call, wanted: bool) -> Iterator[Callable[[], None] | None]:
    """Show how many outputs have ended, and tokens per second; yields what redraws it."""
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
    total = len(call.requests)
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("generating", total=total, speed="")

        def tick() -> None:
            elapsed = progress.tasks[0].elapsed or 0.0
            tokens = sum(len(request.output_ids) for request in call.requests)
            speed = f"{tokens / elapsed:.0f} tokens/s" if elapsed else ""
            progress.update(task, completed=total - call.remaining, speed=speed)

        yield tick
        tick()
