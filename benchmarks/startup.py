"""Seconds from a pool's constructor to its first token. Imports are done before.

    python -m benchmarks.startup
    python -m benchmarks.startup --layers 36 --batch 64 --engines 1 4
    python -m benchmarks.startup --checkpoint-gb 1 --engines 1 --warmup none

Each pool has a process of its own. "Cold": nothing is compiled yet. "Warm": JAX's persistent
compilation cache (JAX_COMPILATION_CACHE_DIR) has the programs of an earlier run. Beside a pool of N
stand N of upstream's Engines with the same options and overlap scheduling, in N processes that
start at once; the slowest counts. All take turns; the table has medians.
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
    add("--upstream", action="store_true", help=argparse.SUPPRESS)  # or in upstream's
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.one:
        options = {} if args.batch is None else {"max_running_requests": args.batch}
        if args.upstream:
            print(json.dumps(upstreams_first_token(args.model, args.warmup, options)), flush=True)
            os._exit(0)  # its threads cannot be stopped
        print(json.dumps(first_token(args.one, args.model, args.warmup, **options)), flush=True)
        return 0
    runs: dict[int, dict[str, list[dict[str, Any]]]] = {
        engines: {"cold": [], "warm": [], "upstream cold": [], "upstream warm": []}
        for engines in args.engines
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
                for who, runner in (("", _run), ("upstream ", _upstreams)):
                    warm = runner(engines, args, str(Path(folder, f"{who}{engines}")))
                    if number:  # the first filled the cache
                        kinds[who + "warm"].append(warm)
                        kinds[who + "cold"].append(runner(engines, args, None))
    rows = [_row(engines, kinds, runs[args.engines[0]]) for engines, kinds in runs.items()]
    plain(
        [
            *("engines", "cold s", "× first row", "× upstream", "warm s", "× first row"),
            *("× upstream", "others' warm-up / first's", "programs compiled"),
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
    started, cpu = time.perf_counter(), time.process_time()
    with EnginePool(model, devices=engines, warmup=warmup, **options) as pool:
        next(iter(pool.stream("12+7=", {"max_new_tokens": 1})))
        seconds = time.perf_counter() - started
        return {
            "seconds": seconds,
            "cpu_seconds": time.process_time() - cpu,
            "start": [pool.stats()["start"], *(e["start"] for e in pool.stats()["engines"])],
            "build": [engine["build_seconds"] for engine in pool.stats()["engines"]],
            "warmup": [engine["warmup_seconds"] for engine in pool.stats()["engines"]],
            "programs": pool.stats()["executables"]["compiled"],
        }


def upstreams_first_token(
    model: str | None, warmup: str, options: dict[str, Any]
) -> dict[str, float]:
    """The same of upstream's Engine."""
    import jax
    from sgl_jax.srt.entrypoints.engine import Engine

    from enginepool import toy
    from enginepool.config import PoolConfig

    started, cpu = time.perf_counter(), time.process_time()
    config = PoolConfig(str(model or toy.checkpoint()), server_args=options)
    # The options that the pool gives its engines, except for compilation and overlap scheduling.
    args = config.for_engine(jax.default_backend(), [0]) | {"disable_overlap_schedule": False}
    engine = Engine(**args | {"disable_precompile": warmup == "none"})
    engine.generate("12+7=", {"max_new_tokens": 1})
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "cpu_seconds": time.process_time() - cpu}


def _run(engines: int, args: argparse.Namespace, cache: str | None) -> dict[str, Any]:
    return _ended(_started(engines, args, cache))


def _upstreams(engines: int, args: argparse.Namespace, cache: str | None) -> dict[str, Any]:
    caches = [None if cache is None else f"{cache}-{index}" for index in range(engines)]
    processes = [_started(1, args, cache, "--upstream") for cache in caches]
    return max(map(_ended, processes), key=lambda run: run["seconds"])


def _started(
    engines: int, args: argparse.Namespace, cache: str | None, *more: str
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.startup", "--one", str(engines), *more]
    command += ["--warmup", args.warmup, *(["--model", args.model] if args.model else [])]
    command += [] if args.batch is None else ["--batch", str(args.batch)]
    env = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    if cache is not None:
        env |= {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)


def _ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{errors}\n{process.args} failed (status {process.returncode})")
    return json.loads(out.strip().splitlines()[-1])


def _row(
    engines: int, kinds: dict[str, list[dict[str, Any]]], first: dict[str, list[dict[str, Any]]]
) -> list[Any]:
    cells: list[Any] = [engines]
    for kind in ("cold", "warm"):
        seconds = [run["seconds"] for run in kinds[kind]]
        cells.append(f"{statistics.median(seconds):.2f}")
        for peers in (first[kind], kinds[f"upstream {kind}"]):
            ratios = [s / one["seconds"] for s, one in zip(seconds, peers, strict=True)]
            cells.append(f"{statistics.median(ratios):.2f}")
    later = f"{100 * later_warmups(kinds['cold']):.0f} %" if engines > 1 else ""
    return [*cells, later, kinds["cold"][0]["programs"]]


def later_warmups(runs: Sequence[dict[str, Any]]) -> float:
    """The warm-up of the engines after the first, over that of the first."""
    return statistics.median(statistics.mean(r["warmup"][1:]) / r["warmup"][0] for r in runs)


if __name__ == "__main__":
    sys.exit(main())
