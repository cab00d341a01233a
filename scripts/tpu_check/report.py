"""Reports of compiled programs, as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from enginepool.doctor.ahead_of_time.record import WEIGHTS, Compiled

_HEAD = (
    *("program", "for", "lowering s", "seconds", "CPU s"),
    *("arguments", "temporaries", "donated", "verdict"),
)


_OVERVIEW = (
    *("model", "layers", "host", "programs", "prefill, CPU s", "temporaries"),
    *("decode, CPU s", "temporaries", "steady, CPU s", "temporaries"),
    *("sampler, CPU s", "temporaries", "KV in place", "verdict"),
)


def table(programs: Sequence[Compiled]) -> str:
    """A table with one line per program. Programs of weights have one line per kind, because there
    is one program per shape."""
    return _markdown(_HEAD, [_row(program) for program in _summed(programs)])


def overview(reports: Sequence[dict[str, Any]]) -> str:
    """A table with one line for each model on a host: the largest program of each kind."""
    return _markdown(_OVERVIEW, [_line(report) for report in reports])


def _markdown(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |"
        for line in lines
    )


def _summed(programs: Sequence[Compiled]) -> list[Compiled]:
    steps = [program for program in programs if program.kind not in WEIGHTS]
    by_kind = ([each for each in programs if each.kind == kind] for kind in WEIGHTS)
    return steps + [line for same in by_kind if same for line in _sum(same)]


def _sum(same: Sequence[Compiled]) -> list[Compiled]:
    """One line for all shapes, with the seconds of all and the sizes of the largest. Programs with
    problems have a line each, and the others then have none."""
    if wrong := [program for program in same if program.problem]:
        return wrong
    largest = max(same, key=lambda program: program.arguments + program.results)
    return [
        replace(
            largest,
            size=f"{len({each.size for each in same})} shapes, to {largest.size.split()[-1]}",
            lowering_seconds=sum(program.lowering_seconds for program in same),
            seconds=sum(program.seconds for program in same),
            cpu_seconds=sum(program.cpu_seconds for program in same),
        )
    ]


def _row(program: Compiled) -> tuple[str, ...]:
    donated = "-"
    if program.donated:
        donated = "yes" if program.aliased >= program.donated else "no"
    return (
        program.kind,
        program.size or "-",
        f"{program.lowering_seconds:.1f}",
        f"{program.seconds:.1f}",
        f"{program.cpu_seconds:.1f}",
        _bytes(program.arguments),
        _bytes(program.temporaries),
        donated,
        program.verdict,
    )


def _line(report: dict[str, Any]) -> tuple[str, ...]:
    programs = report["programs"]
    cells: list[str] = []
    for kind in ("prefill", "decode", "steady", "sampler"):
        same = [program for program in programs if program["kind"] == kind]
        seconds = max((program["cpu_seconds"] for program in same), default=0.0)
        temporaries = max((program["temporaries"] for program in same), default=0)
        cells += [f"{seconds:.1f}", _bytes(temporaries)] if same else ["-", "-"]
    written = [program for program in programs if program["donated"]]
    in_place = all(program["aliased"] >= program["donated"] for program in written)
    problems = sum(program["problem"] is not None for program in programs)
    return (
        *(report["model"], str(report["layers"]), report["topology"], str(len(programs))),
        *cells,
        ("yes" if in_place else "no") if written else "-",
        f"problems: {problems}" if problems else "compiles",
    )


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)
