"""What a request costs beside its steps: many short prompts, one token each, in one call.

    python -m benchmarks.request_path

A pool of one and upstream's `Engine.generate` get the same list of texts, turn about, each in a
process of its own; upstream has overlap scheduling off, which is not its default. The table has
medians. "Grown" is how far a call raised the process's peak of memory, the first time it had so
many prompts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.contestant import Contestant
from benchmarks.synthetic import nano_config, write_model
from benchmarks.table import CORES, plain

# Batches as large as a chip's, so that steps are few.
_SERVER_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "context_length": 64,
    "max_total_tokens": 8192,
    "max_running_requests": 128,
    "max_prefill_tokens": 1024,
    "chunked_prefill_size": 1024,
    "precompile_token_paddings": [1024],
    "precompile_bs_paddings": [128],
}
_KINDS = {"one upstream Engine": "upstream, overlap off", "pool of one": "pool"}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.request_path", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--prompts", type=int, default=10_000)
    add("--rounds", type=int, default=3)
    add("--json", metavar="FILE", help="write all figures there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    params = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in _KINDS}
    with tempfile.TemporaryDirectory(prefix="request-path-") as folder, ExitStack() as stack:
        model = write_model(Path(folder, "model"), nano_config())
        contestants = []
        for name, kind in _KINDS.items():
            cache = Path(folder, "compiled")
            contestants.append(Contestant(name, kind, 1, 1, model, _SERVER_ARGS, cache))
            stack.callback(contestants[-1].close)
        for _ in range(args.rounds):
            for contestant in contestants:
                prompts = [f"{i}+{i % 97}=" for i in range(args.prompts)]
                job = {"step_ms": 0.0, "prompts": prompts, "params": [params] * args.prompts}
                runs[contestant.name].append(contestant.run(job))
    rows = [_row(name, those, args.prompts) for name, those in runs.items()]
    upstream = rows[0]["ms_per_request"]
    print(f"{args.prompts} prompts of a few tokens, one token each, on {CORES} cores:")
    plain(
        ["", "ms a request", "× upstream", "grown, KB a request"],
        [
            [
                row["name"],
                f"{row['ms_per_request']:.3f}",
                f"{row['ms_per_request'] / upstream:.2f}",
                f"{row['grown_kb_per_request']:.1f}",
            ]
            for row in rows
        ],
    )
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2), encoding="utf-8")
    return 0


def _row(name: str, runs: Sequence[dict[str, float]], prompts: int) -> dict[str, Any]:
    return {
        "name": name,
        "ms_per_request": 1000 * statistics.median(run["wall_sec"] for run in runs) / prompts,
        "grown_kb_per_request": 1000 * runs[0]["grown_mb"] / prompts,
    }


if __name__ == "__main__":
    sys.exit(main())
