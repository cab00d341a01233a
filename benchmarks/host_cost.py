"""What a step costs the host: for one engine, section by section, a step and a request.

    python -m benchmarks.host_cost

A tiny model, batches of one and of `--batch` requests in turn, medians; then steps that prefill
`--batch` prompts of four tokens, each of which ends with its first. "GIL" is the processor time of
the engine's thread, an upper bound of the time for which it holds the GIL. The last line is for a
commit's message.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.synthetic import nano_config, write_model
from benchmarks.table import plain
from enginepool import EnginePool
from enginepool.doctor.profile import profile

_TOKENS = 200  # of a request, where it decodes
_PREFILLS = 25  # steps


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_cost", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--batch", type=int, default=8, help="requests of the larger batch; default: 8")
    add("--rounds", type=int, default=5)
    add("--json", metavar="FILE", help="write all figures there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    # Name of a column: requests, tokens of each.
    kinds = {
        "1 request": (1, _TOKENS),
        f"{args.batch} requests": (args.batch, _TOKENS),
        f"prefill of {args.batch}": (args.batch * _PREFILLS, 1),
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    options: dict[str, Any] = {
        "dtype": "float32",
        "context_length": 256,
        "max_total_tokens": 256 * args.batch,
        "max_running_requests": args.batch,
        "precompile_token_paddings": [64],
        "precompile_bs_paddings": [1, args.batch],
    }
    with tempfile.TemporaryDirectory(prefix="host-cost-") as folder:
        model = write_model(Path(folder, "model"), nano_config())
        with EnginePool(str(model), devices=1, **options) as pool:
            for _ in range(args.rounds):
                for name, (requests, tokens) in kinds.items():
                    runs[name].append(profile(pool, requests=requests, tokens=tokens))
    costs = [_medians(those) for those in runs.values()]
    lines = [
        [name, *(f"{cost[name][key]:.3f}" for cost in costs for key in ("ms", "gil_ms"))]
        for name in costs[0]
    ]
    plain(["section, ms a step", *(part for name in kinds for part in (name, "GIL"))], lines)
    step, both = (cost["whole step"]["gil_ms"] for cost in costs[:2])
    request = (both - step) / (args.batch - 1)
    print(f"host cost: {step - request:.3f} ms of GIL a step, and {request:.4f} a request in it")
    if args.json:
        Path(args.json).write_text(json.dumps(runs, indent=2), encoding="utf-8")
    return 0


def _medians(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By section, and of the whole step."""
    names = runs[0]["sections"]
    found = {
        name: {
            key: statistics.median(run["sections"][name][key] for run in runs)
            for key in ("ms", "gil_ms")
        }
        for name in names
    }
    found["whole step"] = {
        "ms": statistics.median(run["step_ms"] for run in runs),
        "gil_ms": statistics.median(run["gil_ms"] for run in runs),
    }
    return found


if __name__ == "__main__":
    sys.exit(main())
