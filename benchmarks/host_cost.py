"""What a step of one engine costs its host, section by section.

    python -m benchmarks.host_cost

The model is tiny. Batches of one and of `--batch` requests take turns with steps that prefill
`--batch` prompts of four tokens, with outputs of one token, and with a full batch in which every
request that ends makes room for one that is prefilled and joins. The table has medians, for each
prefill in that last column, without what its decode steps cost. "GIL" is the processor time of the
engine's thread: it holds the GIL for no longer. The last line is for a commit's message.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import arguments, plain, write_json
from benchmarks.synthetic import nano_config, write_model
from enginepool import EnginePool
from enginepool.doctor.profile import profile
from enginepool.doctor.step_profile import DECODE

_TOKENS = 200  # of a request, where it decodes
_PREFILLS = 25  # steps
# Of a batch whose requests end one after the other: so many steps lie between two ends.
_APART, _JOINS = 4, 60
_ADDED = "prefill of 1 added"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments("host_cost", __doc__)
    add = parser.add_argument
    add("--batch", type=int, default=8, help="requests of the larger batch; default: 8")
    add("--rounds", type=int, default=5)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    lengths = [_APART * (1 + min(n, args.batch - 1)) for n in range(args.batch + _JOINS)]
    # Name of a column: requests, tokens of each.
    kinds: dict[str, tuple[int, int | list[int]]] = {
        "1 request": (1, _TOKENS),
        f"{args.batch} requests": (args.batch, _TOKENS),
        f"prefill of {args.batch}": (args.batch * _PREFILLS, 1),
        _ADDED: (len(lengths), lengths),
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
    costs[-1] = _without_decode(costs[-1], runs[_ADDED])
    lines = [
        [name, *(f"{cost[name][key]:.3f}" for cost in costs for key in ("ms", "gil_ms"))]
        for name in costs[0]
    ]
    plain(["section, ms a step", *(part for name in kinds for part in (name, "GIL"))], lines)
    step, both = (cost["whole step"]["gil_ms"] for cost in costs[:2])
    request = (both - step) / (args.batch - 1)
    wait = statistics.median(run["first_token_ms"] for run in runs[_ADDED])
    eight, added = (cost["whole step"]["gil_ms"] for cost in costs[2:])
    print(
        f"host cost: {step - request:.3f} ms of GIL a step, and {request:.4f} a request in it; "
        f"{eight:.3f} a prefill of {args.batch}, and {added:.3f} a prefill of one added, "
        f"whose first token is there after {wait:.2f} ms"
    )
    write_json(args, runs=runs)
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


def _without_decode(
    cost: dict[str, dict[str, float]], runs: Sequence[dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """For each prefill instead of each step, and without the decode steps' own sections."""
    each = statistics.median(run["steps"] / run["prefills"] for run in runs)
    found = {
        name: {key: 0.0 if name in DECODE else each * value for key, value in part.items()}
        for name, part in cost.items()
    }
    for key in found["whole step"]:
        found["whole step"][key] = sum(
            part[key] for name, part in found.items() if name != "whole step"
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
