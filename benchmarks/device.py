"""What a pool does on the accelerator that JAX has, beside upstream's Engine on the same one.

    python -m benchmarks.device --json device.json
    python -m benchmarks.device --small     # on CPU, to see that it runs; its figures say nothing

It takes five to ten minutes, from a checkout (PYTHONPATH=. if that is not installed). The model has
Qwen3-0.6B's shape and random weights, which are written first; nothing is downloaded. Parts run one
after the other, the most important first. Each has its own process and time limit:

- exact: greedy ids and log-probabilities in float32 against plain JAX;
- pool: start, tokens/s, new weights beside plain JAX, memory, bfloat16 against float32, a failed
  step, the KV cache released and made again, and last the device's busy share by JAX's profiler;
- single, default: upstream's Engine with overlap scheduling, in one process, and in processes as it
  starts them, into which the profiler cannot look;
- all: a pool on all devices, if there are several.

`enginepool doctor --first-run` tries the rest with the toy.

The JSON file is rewritten after every result.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import arguments, plain
from benchmarks.synthetic import write_model
from enginepool.doctor.environment import versions
from enginepool.doctor.first_run.process import GRACE, run_stage
from scripts.train_toy.checkpoint import CONFIG

_SECONDS = 600.0
# The seconds that each part may take, if all have _SECONDS.
PARTS = {"exact": 150.0, "pool": 240.0, "single": 150.0, "default": 180.0, "all": 240.0}
_DEVICES = "devices"
# In place of the toy's.
_QWEN3_06B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "rope_theta": 1e6,
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments("device", __doc__)
    add = parser.add_argument
    add(
        "--seconds",
        type=float,
        default=_SECONDS,
        help="for all parts together; each has its share; default: 600",
    )
    add("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    add("--small", action="store_true", help="a tiny model, few tokens")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    results = _Results(args)
    with tempfile.TemporaryDirectory(prefix="device-") as folder:
        config = CONFIG | {"torch_dtype": "bfloat16"} | ({} if args.small else _QWEN3_06B)
        job = {"model": str(write_model(Path(folder, "model"), config)), "small": args.small}
        _run(_DEVICES, 120.0, job, results)
        found = results.seen(_DEVICES)
        if not found:
            return 1
        job |= {"platform": found["platform"]}
        wanted = [part for part in args.parts if part != "all" or found["count"] > 1]
        end = time.monotonic() + args.seconds
        for part in wanted:
            left = min(PARTS[part] * args.seconds / _SECONDS, end - time.monotonic())
            if left < GRACE:
                results.add({"check": part, "status": "skipped", "problems": ["no time is left"]})
                continue
            _run(part, left, job, results)
    plain(["", "pool", "upstream, one process", "upstream, its default"], _rows(results))
    return 0 if results.ok else 1


def _run(part: str, seconds: float, job: dict[str, Any], results: _Results) -> None:
    stage = {**job, "stage": part, "name": part, "seconds": seconds}
    run_stage(stage, results.add, _say, module="benchmarks.device_parts")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Results:
    """Keeps the outcomes, and writes the file after each."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._file = args.json
        self._about = {"versions": versions(), "small": args.small}
        self._outcomes: list[dict[str, Any]] = []

    def add(self, outcome: dict[str, Any]) -> None:
        self._outcomes.append(outcome)
        took = f" in {outcome['seconds']:.1f} s" if "seconds" in outcome else ""
        said = [f"{outcome['check']}: {outcome['status']}{took}", *outcome.get("problems", [])]
        _say("\n  ".join(said))
        if self._file:
            whole = {**self._about, "ok": self.ok, "checks": self._outcomes}
            Path(self._file).write_text(json.dumps(whole, indent=2), encoding="utf-8")

    @property
    def ok(self) -> bool:
        return all(outcome["status"] in ("ok", "skipped") for outcome in self._outcomes)

    def seen(self, check: str) -> dict[str, Any]:
        """The figures of a check; none if it was not run."""
        found = (o.get("seen", {}) for o in self._outcomes if o["check"] == check)
        return next(found, {})


def _rows(results: _Results) -> list[list[str]]:
    """The table. A missing figure is an empty cell."""

    def row(label: str, name: str, key: str, form: str = "{:.1f}") -> list[str]:
        seen = [results.seen(f"{who}_{name}") for who in ("pool", "single", "default")]
        return [label, *(form.format(each[key]) if each.get(key) else "" for each in seen)]

    def alone(label: str, check: str, key: str, form: str = "{:.3g}") -> list[str]:
        value = results.seen(check).get(key)
        return [label, "" if value is None else form.format(value), "", ""]

    rows = [row("constructor to first token, s", "start", "seconds")]
    for kind in ("decode", "sampled", "arrivals"):
        rows.append(row(f"{kind}, tokens/s", kind, "tokens_per_second", "{:.0f}"))
    rows.append(row("device busy in decode, %", "busy", "percent"))
    rows.append(alone("float32: outputs that are not the reference's", "exact", "wrong", "{}"))
    rows.append(alone("float32: largest error of a log-probability", "exact", "largest_error"))
    rows.append(alone("bfloat16: mean error of a log-probability", "pool_bfloat16", "mean_error"))
    for source, swap in results.seen("pool_swaps").get("sources", {}).items():
        both = f"{swap['gb_per_second']:.2f} (plain JAX {swap['plain_gb_per_second']:.2f})"
        rows.append([f"new weights, {source}, GB/s", both, "", ""])
    rows.append(alone("failed step to serving, s", "pool_fault", "seconds"))
    rows.append(alone("KV cache made again, s", "pool_kv", "resume_seconds"))
    rows.append(alone("memory in use, GB", "pool_memory", "gb"))
    if results.seen("all_decode"):
        rows.append(alone("all devices: decode, tokens/s", "all_decode", "tokens_per_second"))
    return rows


if __name__ == "__main__":
    sys.exit(main())
