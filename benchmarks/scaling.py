"""How close N engines come to N times one: the pool beside what a user would do instead.

    python -m benchmarks.scaling --engines 1 4 8 --step-ms 10

Engines of a tiny model whose steps take `--step-ms` longer with the GIL released. Contestants, in
processes of their own that are stopped while another one runs: the pool; N processes with one
upstream Engine each; threads around `Engine.generate`; one upstream Engine and a pool of one, which
set the measure. Upstream's idle engines are parked, and all of its have overlap scheduling off,
which is not its default. Rounds go turn about; the table has medians.
Efficiency is tokens per second over N times the same kind's with one engine. A point is "limited by
cores", and proves nothing, where N engines need more than 60 % of the cores for their steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.contestant import Contestant
from benchmarks.simulated import SERVER_ARGS
from benchmarks.synthetic import nano_config, write_model
from benchmarks.table import CORES, limited_by_cores, plain

# Tokens of a prompt and of an output, at least and at most.
_WORKLOADS = {"decode": ((3, 3), (32, 96)), "mixed": ((16, 96), (8, 48))}
_HOST = {"python": "a busy Python thread beside it", "jitted": "a jitted step on every device"}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--engines", type=int, nargs="+", default=[1, 2, 4, 8])
    add("--step-ms", type=float, nargs="+", default=[2.0, 5.0, 10.0, 20.0])
    add("--workload", nargs="+", choices=list(_WORKLOADS), default=list(_WORKLOADS))
    # A short list ends with engines that have nothing to do, and is longer or shorter than another:
    # with 16 requests an engine a pool without any cost would have 88 to 110 % of four times one's.
    add("--requests", type=int, default=48, help="per engine, four at a time (default: 48)")
    add("--rounds", type=int, default=3)
    add("--host-work", action="store_true", help="also with the host's own work beside the pool")
    add("--json", metavar="FILE", help="write all figures there")
    add("--plot", metavar="FILE", help="write a PNG of throughput and efficiency there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    rows = []
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        model = write_model(Path(folder, "model"), nano_config())
        for engines in args.engines:
            with _contestants(engines, model) as contestants:
                for workload in args.workload:
                    for step_ms in args.step_ms:
                        found = _measure(contestants, engines, workload, step_ms, args)
                        _show(f"{workload}, up to {engines} engines", found)
                        rows += found
    figures = {"cores": CORES, "arguments": vars(args), "rows": rows}
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2), encoding="utf-8")
    if args.plot:
        from benchmarks.scaling_plot import plot

        plot(rows, Path(args.plot))
    return 0


@contextmanager
def _contestants(engines: int, model: Path) -> Iterator[list[Contestant]]:
    with ExitStack() as stack:

        def start(name: str, kind: str, processes: int, each: int) -> Contestant:
            cache = model.parent / "compiled"
            contestant = Contestant(name, kind, processes, each, model, SERVER_ARGS, cache)
            stack.callback(contestant.close)
            return contestant

        upstream = "upstream, overlap off"
        those = [
            start("one upstream Engine", upstream, 1, 1),
            start("pool of one", "pool", 1, 1),
        ]
        if engines > 1:
            those += [
                start("pool", "pool", 1, engines),
                start("processes", upstream, engines, 1),
                start("threads", upstream, 1, engines),
            ]
        yield those


def _measure(
    contestants: Sequence[Contestant],
    engines: int,
    workload: str,
    step_ms: float,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    runs: dict[str, list[dict[str, float]]] = {}
    for number in range(args.rounds + 1):
        for contestant in contestants:
            alone = contestant.name in ("one upstream Engine", "pool of one")
            requests = args.requests * (1 if alone else engines)
            job = _job(workload, requests, step_ms, seed=number)
            hosts = [None, *_HOST] if args.host_work and contestant.name == "pool" else [None]
            for host in hosts:
                done = contestant.run(job | ({"host": host} if host else {}))
                if number:  # the first round warms up
                    name = f"{contestant.name}, {_HOST[host]}" if host else contestant.name
                    runs.setdefault(name, []).append(done)
    rows = []
    for name, those in runs.items():
        row: dict[str, Any] = {"name": name, "workload": workload, "step_ms": step_ms}
        row |= {key: statistics.median(run[key] for run in those) for key in those[0]}
        row["engines"] = 1 if name in ("one upstream Engine", "pool of one") else engines
        one = "pool of one" if name.startswith("pool") else "one upstream Engine"
        row["efficiency"] = statistics.median(
            run["tokens_per_sec"] / (row["engines"] * reference["tokens_per_sec"])
            for run, reference in zip(those, runs[one], strict=True)
        )
        row["of_upstream"] = statistics.median(
            run["tokens_per_sec"] / (row["engines"] * reference["tokens_per_sec"])
            for run, reference in zip(those, runs["one upstream Engine"], strict=True)
        )
        row["limited_by_cores"] = limited_by_cores(row["engines"], row["cpu_ms_per_step"], step_ms)
        rows.append(row)
    return rows


def _job(workload: str, count: int, step_ms: float, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    prompt, output = _WORKLOADS[workload]
    return {
        "step_ms": step_ms,
        "prompts": [
            [rng.randrange(256) for _ in range(rng.randint(*prompt))] for _ in range(count)
        ],
        "params": [
            {"temperature": 0.0, "max_new_tokens": rng.randint(*output), "ignore_eos": True}
            for _ in range(count)
        ],
    }


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
