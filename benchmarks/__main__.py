"""The table of speed in docs/benchmarks.md: a pool beside its peers.

    python -m benchmarks

Runs `scaling` and `startup`, and prints ratios as Markdown, with the machine. A round takes a
quarter of an hour. Each benchmark prints more by itself.
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

from benchmarks.command import CORES
from benchmarks.startup import later_warmups

_ENGINES = (4, 8)
_STEP_MS = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print(f"{_machine()}; medians of {rounds}.\n\n| | |\n| --- | --- |", flush=True)
    for rows in (_one_engine, _scaling, _startup):
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


def _startup(rounds: int) -> Iterator[tuple[str, str]]:
    for warmup in ("sequential", "parallel"):
        runs = _run("startup", rounds, "--engines", "1", "4", "--warmup", warmup)["runs"]
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


def _run(name: str, rounds: int, *options: str) -> Any:
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        file = Path(folder, "figures.json")
        command = [sys.executable, "-m", f"benchmarks.{name}", "--rounds", str(rounds)]
        subprocess.run([*command, *options, "--json", str(file)], check=True, stdout=sys.stderr)
        return json.loads(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
