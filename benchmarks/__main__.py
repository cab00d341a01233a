"""The table of speed in docs/benchmarks.md: a pool beside its peers, in one run of twenty minutes.

    python -m benchmarks

Runs the benchmarks of speed one after the other and prints the ratios that a reader asks for, as
Markdown, with the machine that they are from. Each benchmark has more, by itself.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.startup import later_warmups
from benchmarks.table import CORES

_ENGINES = (4, 8)
_STEP_MS = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print(f"{_machine()}; medians of {rounds}.\n\n| | |\n| --- | --- |", flush=True)
    for rows in (_one_engine, _scaling, _request_path, _wall, _startup):
        for name, figure in rows(rounds):
            print(f"| {name} | {figure} |", flush=True)
    return 0


def _machine() -> str:
    versions = [
        f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "sglang-jax")
    ]
    python = f"Python {platform.python_version()}"
    return ", ".join([f"{CORES} cores of {platform.machine()}", python, *versions])


def _one_engine(rounds: int) -> Iterator[tuple[str, str]]:
    options = ["--engines", "1", "--step-ms", "0", f"{_STEP_MS:g}", "--workload", "decode"]
    for row in _run("scaling", rounds, *options)["rows"]:
        if row["name"] == "pool of one":
            steps = f"one engine, steps of {row['step_ms']:g} ms"
            yield f"{steps}: tokens/s over upstream's, overlap off", f"{row['of_upstream']:.2f}"


def _scaling(rounds: int) -> Iterator[tuple[str, str]]:
    engines = [str(number) for number in _ENGINES]
    options = ["--engines", *engines, "--step-ms", f"{_STEP_MS:g}", "--workload", "decode"]
    rows = _run("scaling", rounds, *options)["rows"]
    for number in _ENGINES:
        those = {row["name"]: row for row in rows if row["engines"] == number}
        cells = [f"{name} {100 * row['efficiency']:.0f} %" for name, row in those.items()]
        limited = " (limited by cores)" if those["pool"]["limited_by_cores"] else ""
        yield (
            f"{number} engines, steps of {_STEP_MS:g} ms: tokens/s over {number} × one's{limited}",
            ", ".join(cells),
        )


def _request_path(rounds: int) -> Iterator[tuple[str, str]]:
    upstream, pool = _run("request_path", rounds)
    ratio = pool["ms_per_request"] / upstream["ms_per_request"]
    yield (
        "10,000 prompts in one call: time a request over upstream's, overlap off",
        f"{ratio:.2f}",
    )


def _wall(rounds: int) -> Iterator[tuple[str, str]]:
    options = ["--step-ms", f"{_STEP_MS:g}", "--warmup-sequential", "--no-upstream"]
    pool, _ = _run("concurrency", rounds, *options, rounds_option="--repeats")["rows"]
    yield "wall time of 4 engines over their slowest", f"{pool['wall_over_slowest']:.3f}"


def _startup(rounds: int) -> Iterator[tuple[str, str]]:
    for warmup in ("sequential", "parallel"):
        runs = _run("startup", rounds, "--engines", "1", "4", "--warmup", warmup)
        pairs = zip(runs["1"]["cold"], runs["4"]["cold"], strict=True)
        ratio = statistics.median(four["seconds"] / one["seconds"] for one, four in pairs)
        yield (
            f"4 engines' first token over one's, nothing compiled, warmup={warmup}",
            f"{ratio:.2f}",
        )
        if warmup == "sequential":
            yield (
                "engines 2 to 4's warm-up over the first's, one after the other",
                f"{later_warmups(runs['4']['cold']):.2f}",
            )


def _run(name: str, rounds: int, *options: str, rounds_option: str = "--rounds") -> Any:
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        file = Path(folder, "figures.json")
        command = [sys.executable, "-m", f"benchmarks.{name}", rounds_option, str(rounds)]
        subprocess.run([*command, *options, "--json", str(file)], check=True, stdout=sys.stderr)
        return json.loads(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
