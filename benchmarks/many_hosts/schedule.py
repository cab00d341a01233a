"""How well hosts are kept busy, and what an output costs beside a pool in this process.

Wall time over ideal for simulated steps: one `RayEnginePool` over two hosts, beside two of one
host each that get half of the prompts, in random order and sorted by length. Then CPU-ms a
request, of all processes, by the length of outputs, with steps that cost next to nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from benchmarks.many_hosts.nodes import ENVIRONMENT, POOL, STEP_VARIABLE, two_nodes

_SLOTS = 2 * 2 * POOL["max_running_requests"]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=192)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--mean-tokens", type=float, default=75.0)
    parser.add_argument("--requests", type=int, default=400, help="for the overhead")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 3, 6, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures there")


def run(given: argparse.Namespace) -> bool:
    found = {"schedule": _schedule(given), "overhead": _overhead(given)}
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    ratios = found["schedule"]["of_static"]
    return ratios["random"] <= 1.05 and ratios["sorted"] <= 0.75


# Keeping hosts busy


def _schedule(given: argparse.Namespace) -> dict[str, Any]:
    from enginepool.ray import RayEnginePool

    rng = random.Random(given.seed)
    sigma = 0.8
    mu = _log_mean(given.mean_tokens, sigma)
    lengths = [min(400, max(2, round(rng.lognormvariate(mu, sigma)))) for _ in range(given.prompts)]
    orders = {"random": lengths, "sorted": sorted(lengths)}
    ideal = sum(lengths) / _SLOTS * given.step_ms / 1000
    print(f"{given.prompts} outputs, {sum(lengths)} tokens, {_SLOTS} slots: ideal {ideal:.2f} s")
    simulated = {"env_vars": {**ENVIRONMENT, STEP_VARIABLE: f"{given.step_ms:g}"}}
    options: dict[str, Any] = {"devices_per_host": 2, "runtime_env": simulated, **POOL}
    walls: dict[str, list[float]] = {}
    with two_nodes(cpus=2):
        with RayEnginePool(hosts=2, **options) as pool:
            for name, order in orders.items():
                walls[f"one call, {name}"] = [_wall([pool], [order]) for _ in range(given.rounds)]
        with ExitStack() as stack:
            # Wherever Ray puts them: both nodes are this machine.
            halves = [stack.enter_context(RayEnginePool(hosts=1, **options)) for _ in range(2)]
            for name, order in orders.items():
                middle = len(order) // 2
                parts = [order[:middle], order[middle:]]
                walls[f"static halves, {name}"] = [
                    _wall(halves, parts) for _ in range(given.rounds)
                ]
    over = {name: statistics.median(times) / ideal for name, times in walls.items()}
    for name, ratio in over.items():
        print(f"{name}: wall over ideal {ratio:.2f}", flush=True)
    of_static = {
        name: over[f"one call, {name}"] / over[f"static halves, {name}"] for name in orders
    }
    for name, ratio in of_static.items():
        print(f"one call over static halves, {name}: {ratio:.2f}", flush=True)
    return {"ideal": ideal, "walls": walls, "over_ideal": over, "of_static": of_static}


def _log_mean(mean: float, sigma: float) -> float:
    return math.log(mean) - sigma**2 / 2


def _wall(pools: Sequence[Any], parts: Sequence[Sequence[int]]) -> float:
    def ask(pool: Any, lengths: Sequence[int]) -> None:
        params = [{"max_new_tokens": n, "ignore_eos": True, "temperature": 0.0} for n in lengths]
        # One token: no prompt takes part in another's prefix, or in a step of its own for long.
        prompts = [[1 + index % 200] for index in range(len(lengths))]
        results = pool.generate_all(input_ids=prompts, sampling_params=params)
        assert [len(result["output_ids"]) for result in results] == list(lengths)

    started = time.perf_counter()
    with ThreadPoolExecutor(len(pools)) as callers:
        list(callers.map(ask, pools, parts))
    return time.perf_counter() - started


# What an output costs


def _overhead(given: argparse.Namespace) -> list[dict[str, Any]]:
    from enginepool import EnginePool
    from enginepool.ray import RayEnginePool

    with EnginePool(devices=2, **POOL) as pool:
        alone = {n: _cpu_ms(pool, n, given) for n in given.lengths}
    with two_nodes(), RayEnginePool(hosts=2, devices_per_host=1, **POOL) as pool:
        hosts = {n: _cpu_ms(pool, n, given) for n in given.lengths}
    rows = [
        {"tokens": n, "alone": alone[n], "hosts": hosts[n], "more": hosts[n] / alone[n] - 1}
        for n in given.lengths
    ]
    for row in rows:
        print(
            f"{row['tokens']} tokens: CPU-ms a request {row['alone']:.2f} in process, "
            f"{row['hosts']:.2f} on hosts ({100 * row['more']:+.0f} %)",
            flush=True,
        )
    return rows


def _cpu_ms(pool: Any, tokens: int, given: argparse.Namespace) -> float:
    """Of this process and those that it has started, without the first round."""
    prompts = [[1 + index % 200, 2 + index // 200] for index in range(given.requests)]
    params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
    used = []
    for _ in range(given.rounds + 1):
        before = _cpu_seconds()
        pool.generate_all(input_ids=prompts, sampling_params=params)
        used.append(_cpu_seconds() - before)
    return 1000 * statistics.median(used[1:]) / given.requests


def _cpu_seconds() -> float:
    total = 0.0
    here = psutil.Process()
    for process in [here, *here.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total
