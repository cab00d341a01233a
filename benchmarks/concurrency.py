"""Wall time of N engines at once, against their slowest, one engine, and upstream in threads.

    python -m benchmarks.concurrency --num-engines 4 --concurrency 4 --warmup-sequential

Prints `[engine i] generate_sec=... text=...` for each engine, from its first step of the run to
its last output, measured on its own thread; then `DONE: engines=4 wall_sec=...`, measured around
the call. Every request makes exactly --max-new-tokens tokens, so all engines have the same work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from benchmarks import simulated
from benchmarks.table import CORES, limited_by_cores, show
from enginepool import EnginePool
from enginepool.cli.arguments import parse_devices, parse_server_args
from enginepool.config import PoolConfig

# Options that go to upstream's ServerArgs when given, with defaults for the toy on CPU.
_SERVER_OPTIONS = {
    "load_format": (str, None),
    "dtype": (str, None),
    "context_length": (int, 256),
    "max_total_tokens": (int, 1024),
    "max_prefill_tokens": (int, 256),
    "max_running_requests": (int, 4),
    "page_size": (int, None),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.concurrency", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--model", help="directory or hub id; left out, the toy")
    add("--num-engines", type=int, default=4)
    add("--device-indexes", help="ids as in 0,2 (one engine each); instead of --num-engines")
    add("--concurrency", type=int, help="engines that run at once; 1: one after the other")
    add("--engine-per-thread", action="store_true", help="accepted; it is always so")
    add("--warmup-sequential", action="store_true", help="compile first, engine after engine")
    for name, (kind, default) in _SERVER_OPTIONS.items():
        add("--" + name.replace("_", "-"), type=kind, default=default, help=f"default: {default}")
    add("--server-arg", action="append", default=[], metavar="NAME=VALUE", help="any other")
    add("--prompt", default="1+1=")
    add("--max-new-tokens", type=int, default=64)
    add("--requests-per-engine", type=int, help="default: --max-running-requests")
    add("--repeats", type=int, default=3, help="runs of each kind; the table has medians")
    add("--step-ms", type=float, default=0.0, help="simulated device: a step takes this long more")
    add("--no-upstream", action="store_true", help="leave upstream's engines in threads out")
    add("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args(argv)
    ids = parse_devices(args.device_indexes)
    args.devices = [ids] if isinstance(ids, int) else ids or args.num_engines
    args.num_engines = len(args.devices) if isinstance(args.devices, list) else args.devices
    args.concurrency = args.concurrency or args.num_engines
    args.requests_per_engine = args.requests_per_engine or args.max_running_requests
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    given = {name: getattr(args, name) for name in _SERVER_OPTIONS}
    server_args = {name: value for name, value in given.items() if value is not None}
    server_args |= parse_server_args(args.server_arg)
    warmup = "sequential" if args.warmup_sequential else "none"
    accelerator = simulated.install() if args.step_ms else None
    with EnginePool(args.model, devices=args.devices, warmup=warmup, **server_args) as pool:
        print(f"JAX: {_jax()}")
        for engine in pool.stats()["engines"]:
            print(f"[engine {engine['engine_index']}] init device_indexes={engine['devices']}")
        rows = _measure(pool, accelerator, args)
        config = pool.config
    if not args.no_upstream:
        rows.append(_upstream(config, args))
    figures = {
        "jax": _jax(),
        "cores": CORES,
        "arguments": {name: value for name, value in vars(args).items() if name != "json"},
        "rows": rows,
    }
    show(rows)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)


def _measure(
    pool: EnginePool, accelerator: simulated.Accelerator | None, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """All engines at once, then the same work through one of them."""
    each = [args.prompt] * args.requests_per_engine
    params = sampling_params(args.max_new_tokens)
    everything = each * args.num_engines
    if args.warmup_sequential:
        print("Warmup: sequential generate")
        for engine in pool.engines:
            engine.generate(each, params)

    def run(work: Callable[[], list[dict[str, Any]]], report: bool = False) -> dict[str, Any]:
        return _run(pool, accelerator, args.step_ms, work, report)

    def at_once() -> list[dict[str, Any]]:
        if args.concurrency >= args.num_engines:
            return pool.generate_all(everything, params)
        with ThreadPoolExecutor(args.concurrency) as threads:
            answers = threads.map(lambda engine: engine.generate(each, params), pool.engines)
            return [result for results in answers for result in results]

    print(f"Running concurrent generate: concurrency={args.concurrency}")
    runs = [run(at_once, report=True) for _ in range(args.repeats)]
    cold = "" if args.warmup_sequential else ", first run compiling"
    rows = [_row(f"pool, {args.num_engines} engines{cold}", args.num_engines, runs, args)]
    one = pool.engines[0]
    alone = [run(lambda: one.generate(everything, params)) for _ in range(args.repeats)]
    rows.append(_row("the same work, one engine", 1, alone, args))
    return rows


def _run(
    pool: EnginePool,
    accelerator: simulated.Accelerator | None,
    step_ms: float,
    work: Callable[[], list[dict[str, Any]]],
    report: bool,
) -> dict[str, Any]:
    pool.flush_cache()  # no run profits from the one before; also a step boundary of every engine
    if accelerator is not None:
        accelerator.reset(step_ms / 1000)
    cpu, started = time.process_time(), time.perf_counter()
    results = work()
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    texts = {result["meta_info"]["engine_index"]: result["text"] for result in results}
    busy = {e["engine_index"]: e["busy_seconds"] for e in pool.stats()["engines"]}
    seconds = {index: busy[index] for index in sorted(texts)}
    if report:
        for index, value in seconds.items():
            print(f"[engine {index}] generate_sec={value:.3f} text={texts[index][:60]!r}")
        print(f"DONE: engines={len(seconds)} wall_sec={wall:.3f}")
    tokens = sum(result["meta_info"]["completion_tokens"] for result in results)
    return {
        "wall_sec": wall,
        "generate_sec": list(seconds.values()),
        "tokens": tokens,
        "cpu_sec": cpu,
        **simulated.figures(accelerator, tokens),
    }


def _row(
    name: str, engines: int, runs: Sequence[dict[str, Any]], args: argparse.Namespace
) -> dict[str, Any]:
    def median(figure: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(map(figure, runs))

    row = {
        "name": name,
        "engines": engines,
        "wall_sec": median(lambda run: run["wall_sec"]),
        "slowest_sec": median(lambda run: max(run["generate_sec"])),
        "wall_over_slowest": median(lambda run: run["wall_sec"] / max(run["generate_sec"])),
        "tokens_per_sec": median(lambda run: run["tokens"] / run["wall_sec"]),
        "busy_cores": median(lambda run: run["cpu_sec"] / run["wall_sec"]),
        "runs": list(runs),
    }
    if args.step_ms:
        cpu_ms = median(lambda run: 1000 * run["cpu_sec"] / run["steps"])
        row["cpu_ms_per_step"] = cpu_ms
        row["limited_by_cores"] = limited_by_cores(engines, cpu_ms, args.step_ms)
    return row


def _upstream(config: PoolConfig, args: argparse.Namespace) -> dict[str, Any]:
    """The peer, in a process of its own: upstream's engines cannot be shut down cleanly."""
    job = {
        "model": config.model,
        "server_args": dict(config.server_args),
        "devices": args.devices,
        "concurrency": args.concurrency,
        "prompts": [args.prompt] * args.requests_per_engine,
        "sampling_params": sampling_params(args.max_new_tokens),
        "warmup": args.warmup_sequential,
        "step_ms": args.step_ms,
        "repeats": args.repeats,
    }
    print("Running upstream's Engines in threads, in a process of their own")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.upstream_threads"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"{done.stderr}\nupstream's engines failed (status {done.returncode})")
    runs = json.loads(done.stdout.strip().splitlines()[-1])
    name = f"upstream Engine.generate in {args.num_engines} threads"
    return _row(name, args.num_engines, runs, args)


def sampling_params(max_new_tokens: int) -> dict[str, Any]:
    """Greedy, and past the end token: the same work for every request."""
    return {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}


def _jax() -> dict[str, Any]:
    devices = jax.local_devices()
    return {"jax": jax.__version__, "backend": devices[0].platform, "devices": len(devices)}


if __name__ == "__main__":
    main()
