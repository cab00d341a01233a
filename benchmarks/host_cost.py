"""What a step of one engine costs its host, section by section.

    python -m benchmarks.host_cost

The model is tiny. Four runs take turns: batches of one and of `--batch` requests that decode; steps
that prefill `--batch` prompts of four tokens, for outputs of one token; and a full batch in which a
prefilled request joins whenever another ends. The table has medians. Those of the last run are per
prefill, without the cost of decode steps. "GIL" is the processor time of the engine's thread, an
upper bound of the time for which it holds the GIL. The last line is for a commit's message.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import arguments, plain, write_json
from benchmarks.synthetic import nano_config, write_model
from enginepool import EnginePool
from enginepool.doctor.profile import profile
from enginepool.doctor.step_profile import DECODE

_TOKENS = 200  # of a request, where it decodes
_PREFILLS = 25  # steps
_JOINS = 60  # requests that join
_ADDED = "prefill of 1 added"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments("host_cost", __doc__)
    add = parser.add_argument
    add("--batch", type=int, default=8, help="requests of the larger batch; default: 8")
    add("--rounds", type=int, default=5)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    # Requests end one after the other. With so many steps between two ends no prefill is put off.
    lengths = [args.batch * (1 + min(n, args.batch - 1)) for n in range(args.batch + _JOINS)]
    # Name of a column: requests, tokens of each.
    kinds: dict[str, tuple[int, int | list[int]]] = {
        "1 request": (1, _TOKENS),
        f"{args.batch} requests": (args.batch, _TOKENS),
        f"prefill of {args.batch}": (args.batch * _PREFILLS, 1),
        _ADDED: (len(lengths), lengths),
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory(prefix="host-cost-") as folder:
        model = write_model(Path(folder, "model"), nano_config())
        with EnginePool(str(model), **_options(args.batch)) as pool:
            for _ in range(args.rounds):
                for name, (requests, tokens) in kinds.items():
                    runs[name].append(profile(pool, requests=requests, tokens=tokens))
    costs = [_medians(those) for those in runs.values()]
    costs[-1] = _without_decode(costs[-1], runs[_ADDED])
    _show(kinds, costs)
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


def _options(batch: int) -> dict[str, Any]:
    return {
        "devices": 1,
        "dtype": "float32",
        "context_length": 256,
        "max_total_tokens": 256 * batch,
        "max_running_requests": batch,
        "precompile_token_paddings": [64],
        "precompile_bs_paddings": [1, batch],
    }


def _show(names: Iterable[str], costs: Sequence[dict[str, dict[str, float]]]) -> None:
    lines = [
        [name, *(f"{cost[name][key]:.3f}" for cost in costs for key in ("ms", "gil_ms"))]
        for name in costs[0]
    ]
    plain(["section, ms a step", *(part for name in names for part in (name, "GIL"))], lines)


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
