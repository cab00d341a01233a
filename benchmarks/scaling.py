"""How close N engines come to N times one engine: a pool, N processes, N threads.

    python -m benchmarks.scaling --engines 1 4 8 --step-ms 10

A step of the tiny model takes `--step-ms` longer, with the GIL released. The contestants are a
pool; N processes with one upstream Engine each; one process with N upstream Engines, each called on
a thread of its own. One upstream Engine and a pool of one set the measure. Each contestant has
processes of its own, which are stopped while another one runs. Overlap scheduling is off in
upstream's engines (it is on by default), and idle ones sleep. The contestants take turns in every
round; the table has medians.

Efficiency is tokens per second over N times that of the same kind's one engine. "Limited by cores"
means that N engines need more than 60 % of the cores for their steps. Such a figure proves nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from benchmarks.command import CORES, arguments, limited_by_cores, medians, plain, write_json
from benchmarks.contestant import Contestant, random_job
from benchmarks.simulated import SERVER_ARGS
from benchmarks.synthetic import nano_config, write_model

# Tokens of a prompt and of an output, at least and at most.
_WORKLOADS = {"decode": ((3, 3), (32, 96)), "mixed": ((16, 96), (8, 48))}
_UPSTREAM = "upstream, overlap off"
_ALONE = {"one upstream Engine": _UPSTREAM, "pool of one": "pool"}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments("scaling", __doc__)
    add = parser.add_argument
    add("--engines", type=int, nargs="+", default=[1, 2, 4, 8])
    add("--step-ms", type=float, nargs="+", default=[2.0, 5.0, 10.0, 20.0])
    add("--workload", nargs="+", choices=list(_WORKLOADS), default=list(_WORKLOADS))
    # At the end of a list some engines have nothing to do. Of 16 requests an engine, a pool without
    # any cost would have 88 to 110 % of four times one engine's throughput.
    add("--requests", type=int, default=48, help="per engine, four at a time; default: 48")
    add("--rounds", type=int, default=3)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    rows = []
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        model = write_model(Path(folder, "model"), nano_config())
        for engines in args.engines:
            with ExitStack() as stack:
                contestants = [
                    stack.enter_context(closing(Contestant(name, kind, model, SERVER_ARGS, **n)))
                    for name, kind, n in _names(engines)
                ]
                for workload in args.workload:
                    for step_ms in args.step_ms:
                        found = _measure(contestants, engines, workload, step_ms, args)
                        _show(f"{workload}, up to {engines} engines", found)
                        rows += found
    write_json(args, rows=rows)
    return 0


def _names(engines: int) -> list[tuple[str, str, dict[str, int]]]:
    """The name and the kind of each contestant, and how many processes or engines it has."""
    alone: list[tuple[str, str, dict[str, int]]] = [(name, _ALONE[name], {}) for name in _ALONE]
    if engines == 1:
        return alone
    return [
        *alone,
        ("pool", "pool", {"engines": engines}),
        ("processes", _UPSTREAM, {"processes": engines}),
        ("threads", _UPSTREAM, {"engines": engines}),
    ]


def _measure(
    contestants: Sequence[Contestant],
    engines: int,
    workload: str,
    step_ms: float,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    runs: dict[str, list[dict[str, float]]] = {}
    for number in range(args.rounds + 1):  # the first warms up
        for contestant in contestants:
            requests = args.requests * (1 if contestant.name in _ALONE else engines)
            done = contestant.run(random_job(requests, *_WORKLOADS[workload], step_ms, number))
            if number:
                runs.setdefault(contestant.name, []).append(done)
    rows = []
    for name, those in runs.items():
        row: dict[str, Any] = {"name": name, "workload": workload, "step_ms": step_ms}
        row |= medians(those) | {"engines": 1 if name in _ALONE else engines}
        one = "pool of one" if name.startswith("pool") else "one upstream Engine"
        row["efficiency"] = _share(those, runs[one], row["engines"])
        row["of_upstream"] = _share(those, runs["one upstream Engine"], row["engines"])
        row["limited_by_cores"] = limited_by_cores(row["engines"], row["cpu_ms_per_step"], step_ms)
        rows.append(row)
    return rows


def _share(
    runs: Sequence[dict[str, float]], alone: Sequence[dict[str, float]], engines: int
) -> float:
    """Tokens per second over so many times those of one engine."""
    pairs = zip(runs, alone, strict=True)
    return statistics.median(
        run["tokens_per_sec"] / (engines * one["tokens_per_sec"]) for run, one in pairs
    )


def _show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    print(f"{title}, on {CORES} cores:", flush=True)
    plain(
        ["step ms", "", "engines", "tokens/s", "efficiency", "CPU ms a step", "tokens/sim. s"],
        [
            [
                f"{row['step_ms']:g}",
                row["name"] + (" (limited by cores)" if row["limited_by_cores"] else ""),
                row["engines"],
                f"{row['tokens_per_sec']:.0f}",
                f"{100 * row['efficiency']:.0f} %",
                f"{row['cpu_ms_per_step']:.2f}",
                f"{row['tokens_per_simulated_second']:.0f}",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
