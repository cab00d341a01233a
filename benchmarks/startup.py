"""Seconds from a pool's constructor to its first token. Imports are done before.

    python -m benchmarks.startup
    python -m benchmarks.startup --layers 36 --batch 64 --engines 1 4
    python -m benchmarks.startup --checkpoint-gb 1 --engines 1 --warmup none

Each pool has a process of its own. "Cold" is with nothing compiled. "Warm" is with what an earlier
run compiled, in JAX's persistent compilation cache (JAX_COMPILATION_CACHE_DIR). The numbers of
engines take turns; the table has medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import arguments, plain, write_json
from benchmarks.synthetic import nano_config, sized_config, weight_bytes, write_model


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments("startup", __doc__)
    add = parser.add_argument
    add("--engines", type=int, nargs="+", default=[1, 2, 4, 8])
    add("--rounds", type=int, default=3)
    add("--model", help="directory or hub id; default: the toy")
    add("--layers", type=int, help="a tiny Qwen3 of so many layers, in place of --model")
    add("--checkpoint-gb", type=float, help="a Qwen3 of about so many GB, in place of --model")
    add("--batch", type=int, help="max_running_requests; default: the pool's")
    add("--warmup", default="sequential", choices=["sequential", "parallel", "none"])
    add("--one", type=int, metavar="N", help=argparse.SUPPRESS)  # in the pool's own process
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.one:
        options = {} if args.batch is None else {"max_running_requests": args.batch}
        print(json.dumps(first_token(args.one, args.model, args.warmup, **options)), flush=True)
        return 0
    runs: dict[int, dict[str, list[dict[str, Any]]]] = {
        engines: {"cold": [], "warm": []} for engines in args.engines
    }
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        config = None
        if args.layers is not None:
            config = nano_config() | {"num_hidden_layers": args.layers}
        elif args.checkpoint_gb is not None:
            config = sized_config(args.checkpoint_gb * 1e9, "float32")
        if config is not None:
            args.model = str(write_model(Path(folder, "model"), config))
            print(f"{weight_bytes(config) / 1e9:.3f} GB of weights", flush=True)
        for number in range(args.rounds + 1):
            for engines, kinds in runs.items():
                warm = _run(engines, args, str(Path(folder, str(engines))))
                if number:  # the first filled the cache
                    kinds["warm"].append(warm)
                    kinds["cold"].append(_run(engines, args, None))
    rows = [_row(engines, kinds, runs[args.engines[0]]) for engines, kinds in runs.items()]
    plain(
        [
            *("engines", "cold s", "× first row", "warm s", "× first row"),
            *("others' warm-up / first's", "programs compiled"),
        ],
        rows,
    )
    write_json(args, runs=runs)
    return 0


def first_token(engines: int, model: str | None, warmup: Any, **options: Any) -> dict[str, Any]:
    """Seconds from the constructor to the first token, and what they were spent on."""
    import patches

    applied = patches.apply()  # upstream's imports, without their side effects
    import sgl_jax.srt.entrypoints.engine  # noqa: F401

    from enginepool import EnginePool

    patches.revert(applied)
    started = time.perf_counter()
    with EnginePool(model, devices=engines, warmup=warmup, **options) as pool:
        next(iter(pool.stream("12+7=", {"max_new_tokens": 1})))
        seconds = time.perf_counter() - started
        return {
            "seconds": seconds,
            "build": [engine["build_seconds"] for engine in pool.stats()["engines"]],
            "warmup": [engine["warmup_seconds"] for engine in pool.stats()["engines"]],
            "programs": pool.stats()["executables"]["compiled"],
        }


def _run(engines: int, args: argparse.Namespace, cache: str | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.startup", "--one", str(engines)]
    command += ["--warmup", args.warmup, *(["--model", args.model] if args.model else [])]
    command += [] if args.batch is None else ["--batch", str(args.batch)]
    env = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    if cache is not None:
        env |= {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stderr}\na pool of {engines} failed (status {done.returncode})")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _row(
    engines: int, kinds: dict[str, list[dict[str, Any]]], first: dict[str, list[dict[str, Any]]]
) -> list[Any]:
    cells: list[Any] = [engines]
    for kind, runs in kinds.items():
        seconds = [run["seconds"] for run in runs]
        ratios = [s / one["seconds"] for s, one in zip(seconds, first[kind], strict=True)]
        cells += [f"{statistics.median(seconds):.2f}", f"{statistics.median(ratios):.2f}"]
    later = f"{100 * later_warmups(kinds['cold']):.0f} %" if engines > 1 else ""
    return [*cells, later, kinds["cold"][0]["programs"]]


def later_warmups(runs: Sequence[dict[str, Any]]) -> float:
    """The warm-up of the engines after the first, over that of the first."""
    return statistics.median(statistics.mean(r["warmup"][1:]) / r["warmup"][0] for r in runs)


if __name__ == "__main__":
    sys.exit(main())
