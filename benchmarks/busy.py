"""How busy the device is kept: a pool beside upstream's Engine as its users run it.

    python -m benchmarks.busy --engines 1 4 8 --step-ms 5 10

The model is a Qwen3 of 36 layers on a simulated accelerator (`simulated.py`). Layers and attention
leave the CPU alone; every weight and KV buffer is an argument and a result of the step. The
contestants are a pool, and N processes with one upstream Engine each, in its default (overlap
scheduling on). Each has processes of its own, which are stopped while another one runs. They take
turns in every round; the table has medians.

"Busy" is steps times step time over wall time, from the beginning of the first step to the end of
the last. "Ceiling" is the busy share while one decode program is launched again and again and
nothing else runs. "Limited by cores" means that N engines need more than 60 % of the cores for
their steps. Such a figure proves nothing. "Tokens/s" is by wall time: a contestant that takes more
steps for the same outputs is busier, not faster.

Workloads:
  decode    full batches that begin and end together
  arrivals  three times as many requests as the batches hold, of uneven prompts and outputs
  sampled   decode, at temperature 1 with top_k 20 and top_p 0.95
  grammars  decode, with a regular expression for every output (without upstream)

"Fell back" is the share of a pool's decode steps that upstream's loop ran.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from benchmarks.command import CORES, arguments, limited_by_cores, medians, plain, write_json
from benchmarks.contestant import Contestant, random_job
from benchmarks.synthetic import nano_config, write_model

_LAYERS = 36  # as Qwen3-4B: 400 leaves
_WORKLOADS = ("decode", "arrivals", "sampled", "grammars")
_SAMPLED = {"temperature": 1.0, "top_k": 20, "top_p": 0.95}
_GRAMMAR = {"regex": "[0-9a-f]{512}", "ignore_eos": False}  # longer than any output
# Tokens of a prompt and of an output, at least and at most; "decode" outputs have --tokens.
_PROMPT, _SHORT_PROMPT, _OUTPUT = (3, 60), (3, 3), (20, 199)
# Tokens of KV cache beside a request's own: an engine takes some ahead.
_AHEAD = 64


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments("busy", __doc__)
    add = parser.add_argument
    add("--engines", type=int, nargs="+", default=[1, 4, 8])
    add("--step-ms", type=float, nargs="+", default=[5.0, 10.0, 20.0])
    add("--batch", type=int, default=64, help="requests of an engine at a time; default: 64")
    add("--workload", nargs="+", choices=_WORKLOADS, default=["decode", "arrivals"])
    add("--tokens", type=int, default=200, help="tokens of an output of decode; default: 200")
    add("--rounds", type=int, default=3)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    rows = []
    with tempfile.TemporaryDirectory(prefix="busy-") as folder:
        model = write_model(Path(folder, "model"), nano_config() | {"num_hidden_layers": _LAYERS})
        for engines in args.engines:
            rows += _contest(engines, model, args)
    write_json(args, rows=rows)
    return 0


def _contest(engines: int, model: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    options = _server_args(args.batch, args.tokens)
    with ExitStack() as stack:
        contestants = [
            stack.enter_context(closing(Contestant(name, model, options, engines)))
            for name in ("pool", "processes")
        ]
        for workload in args.workload:
            for step_ms in args.step_ms:
                those = [c for c in contestants if workload != "grammars" or c.name == "pool"]
                found = _measure(those, engines, workload, step_ms, args)
                _show(f"{workload}, batches of {args.batch}", found)
                rows += found
    return rows


def _server_args(batch: int, tokens: int) -> dict[str, Any]:
    """Options of engines whose KV cache has room for a batch at full length, and little more."""
    longest = max(_PROMPT[1] + _OUTPUT[1], _SHORT_PROMPT[1] + tokens)
    return {
        "dtype": "float32",
        "context_length": 512,
        "max_total_tokens": (longest + _AHEAD) * batch,
        "max_running_requests": batch,
        "max_prefill_tokens": 256,
        "chunked_prefill_size": 256,
        "precompile_token_paddings": [256],
        "precompile_bs_paddings": [batch],
    }


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
            done = contestant.run(_job(workload, engines * args.batch, step_ms, args, seed=number))
            if number:
                runs.setdefault(contestant.name, []).append(done)
            if contestant.name == "pool":
                alone = contestant.run({"step_ms": step_ms, "ceiling": args.tokens})
                alone["busy_share"] *= engines  # only one engine ran
                if number:
                    runs.setdefault("ceiling", []).append(alone)
    rows = []
    for name, those in runs.items():
        row: dict[str, Any] = {"name": name, "workload": workload, "step_ms": step_ms}
        row |= medians(those) | {"engines": 1 if name == "ceiling" else engines}
        row["spread"] = [run["busy_share"] for run in those]
        row["limited_by_cores"] = limited_by_cores(row["engines"], row["cpu_ms_per_step"], step_ms)
        rows.append(row)
    return rows


def _job(
    workload: str, running: int, step_ms: float, args: argparse.Namespace, seed: int
) -> dict[str, Any]:
    if workload == "arrivals":
        return random_job(3 * running, _PROMPT, _OUTPUT, step_ms, seed)
    job = random_job(running, _SHORT_PROMPT, (args.tokens, args.tokens), step_ms, seed)
    if workload == "sampled":
        job["params"] = [one | _SAMPLED for one in job["params"]]
    if workload == "grammars":
        job["params"] = [one | _GRAMMAR for one in job["params"]]
    return job


def _show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    print(f"{title}, on {CORES} cores:", flush=True)
    plain(
        [
            *("engines", "step ms", "", "busy", "of each round", "tokens/s", "CPU ms a step"),
            "fell back",
        ],
        [
            [
                row["engines"],
                f"{row['step_ms']:g}",
                row["name"] + (" (limited by cores)" if row["limited_by_cores"] else ""),
                f"{100 * row['busy_share']:.1f} %",
                " ".join(f"{100 * share:.1f}" for share in row["spread"]),
                f"{row['tokens_per_sec']:,.0f}" if row["name"] != "ceiling" else "",
                f"{row['cpu_ms_per_step']:.2f}",
                f"{100 * row['fallback_share']:.1f} %" if row["name"] == "pool" else "",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
