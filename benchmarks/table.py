"""The table of a benchmark, and when a figure proves nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from enginepool.doctor.environment import usable_cores

CORES = usable_cores()


def limited_by_cores(engines: int, cpu_ms_per_step: float, step_ms: float) -> bool:
    """Whether the host had too few cores for these engines: such a point proves nothing."""
    return engines * cpu_ms_per_step > 0.6 * CORES * step_ms


def plain(headers: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    """Print a table."""
    table = Table(*headers)
    for line in lines:
        table.add_row(*map(str, line))
    _console().print(table)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print medians, the first row's wall time over the others', and what limits them."""
    plain(
        ("", "wall s", "slowest s", "wall/slowest", "tokens/s", "busy cores", "× first row"),
        (
            (
                row["name"] + (" (limited by cores)" if row.get("limited_by_cores") else ""),
                f"{row['wall_sec']:.3f}",
                f"{row['slowest_sec']:.3f}",
                f"{row['wall_over_slowest']:.3f}",
                f"{row['tokens_per_sec']:.0f}",
                f"{row['busy_cores']:.2f} of {CORES}",
                f"{row['wall_sec'] / rows[0]['wall_sec']:.2f}",
            )
            for row in rows
        ),
    )
    for row in rows:
        if "cpu_ms_per_step" in row:
            simulated = row["runs"][-1]["tokens_per_simulated_second"]
            _console().print(
                f"{row['name']}: {row['cpu_ms_per_step']:.1f} ms of CPU a step; tokens advanced "
                f"per simulated second: {simulated}"
            )


def _console() -> Console:
    return Console(highlight=False, width=None if Console().is_terminal else 140)
