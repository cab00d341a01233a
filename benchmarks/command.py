"""Shared by benchmarks: arguments, tables, figures as JSON, and the limit of the cores."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from enginepool.process.cores import usable_cores

CORES = usable_cores()


def arguments(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser with `--json`. Its `--help` is the module's docstring."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    return parser


def write_json(args: argparse.Namespace, **figures: Any) -> None:
    """Write figures to the file that `--json` names, with the arguments and the machine."""
    if args.json:
        about = {"jax": jax.__version__, "cores": CORES, "arguments": vars(args)}
        Path(args.json).write_text(json.dumps(about | figures, indent=2), encoding="utf-8")


def plain(headers: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    """Print a table."""
    table = Table(*headers)
    for line in lines:
        table.add_row(*map(str, line))
    console = Console(highlight=False, width=None if Console().is_terminal else 140)
    console.print(table)


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def limited_by_cores(engines: int, cpu_ms_per_step: float, step_ms: float) -> bool:
    """Whether the engines need more than 60 % of the cores for their steps."""
    return engines * cpu_ms_per_step > 0.6 * CORES * step_ms
