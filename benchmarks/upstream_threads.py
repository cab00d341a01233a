"""The peer: upstream's own Engines, one a device, each built and called on a thread of its own.

Reads a job as JSON from standard input and prints the runs as JSON. A process of its own, which
ends without cleaning up: these engines' threads cannot be stopped.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import patches
from benchmarks import simulated
from enginepool.config import PoolConfig
from enginepool.devices import resolve_devices


def main() -> None:
    job = json.load(sys.stdin)
    devices = [group[0] for group in resolve_devices(job["devices"], 1)]
    # Without repairs engines cannot be built off the main thread; what makes ours faster is ours.
    patches.apply([patch for patch in patches.ALL if not patch.optimisation])
    accelerator = simulated.install() if job["step_ms"] else None
    config = PoolConfig(job["model"], server_args=job["server_args"])
    first = min(device.id for device in devices)
    # An engine's event loop belongs to the thread that built it, so each engine has its thread.
    threads = [ThreadPoolExecutor(1) for _ in devices]
    engines = [
        thread.submit(_build, config, device.platform, device.id - first, job["warmup"]).result()
        for thread, device in zip(threads, devices, strict=True)
    ]
    if job["warmup"]:
        for thread, engine in zip(threads, engines, strict=True):
            thread.submit(_generate, engine, job).result()
    runs = [_run(threads, engines, accelerator, job) for _ in range(job["repeats"])]
    print(json.dumps(runs), flush=True)
    os._exit(0)


def _build(config: PoolConfig, platform: str, device_index: int, warmup: bool) -> Any:
    from sgl_jax.srt.entrypoints.engine import Engine

    # The very options that the pool gives its engines, save who compiles.
    args = config.for_engine(platform, [device_index])
    return Engine(**args | {"disable_precompile": not warmup})


def _generate(engine: Any, job: dict[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    results = engine.generate(job["prompts"], job["sampling_params"])
    return {
        "seconds": time.perf_counter() - started,
        "tokens": sum(result["meta_info"]["completion_tokens"] for result in results),
    }


def _run(
    threads: list[ThreadPoolExecutor],
    engines: list[Any],
    accelerator: simulated.Accelerator | None,
    job: dict[str, Any],
) -> dict[str, Any]:
    for thread, engine in zip(threads, engines, strict=True):
        thread.submit(engine.flush_cache).result()
    if accelerator is not None:
        accelerator.reset(job["step_ms"] / 1000)
    cpu, started = time.process_time(), time.perf_counter()
    answers = []
    for begin in range(0, len(engines), job["concurrency"]):
        group = slice(begin, begin + job["concurrency"])
        futures = [
            thread.submit(_generate, engine, job)
            for thread, engine in zip(threads[group], engines[group], strict=True)
        ]
        answers += [future.result() for future in futures]
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    tokens = sum(answer["tokens"] for answer in answers)
    return {
        "wall_sec": wall,
        "generate_sec": [answer["seconds"] for answer in answers],
        "tokens": tokens,
        "cpu_sec": cpu,
        **simulated.figures(accelerator, tokens),
    }


if __name__ == "__main__":
    main()
