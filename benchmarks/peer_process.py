"""One contestant (`contestant.py`), in its own process: a pool, or upstream's Engines.

The first line of standard input is a JSON object that says what to build; it answers "ready".
Every further line is a job, and is answered with a JSON object: what the run took. Prompts are
texts, or lists of token ids.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax

from benchmarks.simulated import SimulatedDevice
from enginepool.config import PoolConfig
from enginepool.devices import resolve_devices

# How long an idle engine of upstream's sleeps; by itself it would spin and starve its siblings.
_PARKED_SECONDS = 0.001

Generate = Callable[[list[Any], list[dict[str, Any]]], int]


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever else is printed is no answer
    setup = json.loads(sys.stdin.readline())
    build = _pool if setup["kind"] == "pool" else _upstream
    engines, generate, flush = build(setup)
    devices = [SimulatedDevice(engine, 0.0) for engine in engines]
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        flush()
        for device in devices:
            device.reset()
            device.step_seconds = job["step_ms"] / 1000
        with _host(job.get("host")) as rounds:
            before = _peak_mb()
            cpu, started = time.process_time(), time.perf_counter()
            tokens = generate(job["prompts"], job["params"])
            wall, cpu = time.perf_counter() - started, time.process_time() - cpu
            done = rounds()
        steps = sum(device.steps for device in devices)
        answer = {
            "tokens": tokens,
            "grown_mb": _peak_mb() - before,
            "cpu_ms_per_step": 1000 * cpu / steps,
            "host_rounds_per_sec": done / wall,
            "tokens_per_simulated_second": [d.tokens_per_simulated_second for d in devices],
        }
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # upstream's threads cannot be stopped


def _pool(setup: dict[str, Any]) -> tuple[Sequence[Any], Generate, Callable[[], Any]]:
    from enginepool import EnginePool

    pool = EnginePool(setup["model"], devices=setup["engines"], **setup["server_args"]).open()

    def generate(prompts: list[Any], params: list[dict[str, Any]]) -> int:
        texts, ids = _texts_or_ids(prompts)
        results = pool.generate_all(texts, params, input_ids=ids)
        return sum(result["meta_info"]["completion_tokens"] for result in results)

    return pool.engines, generate, pool.flush_cache


def _upstream(setup: dict[str, Any]) -> tuple[Sequence[Any], Generate, Callable[[], Any]]:
    import patches

    # Without repairs engines cannot be built off the main thread; what makes ours faster is ours.
    patches.apply([patch for patch in patches.ALL if not patch.optimisation])
    config = PoolConfig(setup["model"], server_args=setup["server_args"])
    groups = resolve_devices(setup["engines"], 1)
    # An engine's event loop belongs to the thread that built it, so each engine has its thread.
    threads = [ThreadPoolExecutor(1) for _ in groups]
    engines = [
        thread.submit(_engine, config, index, group[0].platform).result()
        for index, (thread, group) in enumerate(zip(threads, groups, strict=True))
    ]

    def generate(prompts: list[Any], params: list[dict[str, Any]]) -> int:
        texts, ids = _texts_or_ids(prompts)
        futures = [
            thread.submit(
                engine.generate,
                texts and texts[index :: len(engines)],
                params[index :: len(engines)],
                input_ids=ids and ids[index :: len(engines)],
            )
            for index, (thread, engine) in enumerate(zip(threads, engines, strict=True))
        ]
        results = [result for future in futures for result in future.result()]
        return sum(result["meta_info"]["completion_tokens"] for result in results)

    def flush() -> None:
        for thread, engine in zip(threads, engines, strict=True):
            thread.submit(engine.flush_cache).result()

    return engines, generate, flush


def _engine(config: PoolConfig, index: int, platform: str) -> Any:
    from sgl_jax.srt.entrypoints.engine import Engine

    # The very options that the pool gives its engines, save who compiles.
    engine = Engine(**config.for_engine(platform, [index]) | {"disable_precompile": False})
    scheduler: Any = engine.scheduler_info["scheduler"]
    scheduler.on_idle = lambda: time.sleep(_PARKED_SECONDS)
    return engine


def _texts_or_ids(prompts: list[Any]) -> tuple[list[Any] | None, list[Any] | None]:
    return (prompts, None) if isinstance(prompts[0], str) else (None, prompts)


def _peak_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e3)


@contextmanager
def _host(kind: str | None) -> Iterator[Callable[[], int]]:
    """The host program's own work beside the engines; gives how many rounds of it are done."""
    if kind is None:
        yield lambda: 0
        return
    work, rounds, over = _WORK[kind](), 0, threading.Event()

    def run() -> None:
        nonlocal rounds
        while not over.is_set():
            work()
            rounds += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: rounds
    finally:
        over.set()
        thread.join()


def _python() -> Callable[[], Any]:
    return lambda: sum(range(10_000))


def _jitted() -> Callable[[], Any]:
    """A step on every device, as a trainer's."""
    step = jax.jit(lambda x: jax.numpy.tanh(x @ x))
    arrays = [jax.device_put(jax.numpy.ones((128, 128)), device) for device in jax.devices()]

    def work() -> None:
        for done in [step(array) for array in arrays]:
            done.block_until_ready()

    work()
    return work


_WORK = {"python": _python, "jitted": _jitted}


if __name__ == "__main__":
    main()
