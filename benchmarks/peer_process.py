"""One contestant (`contestant.py`), in its own process: a pool, or upstream's Engines.

The first line of standard input is a JSON object that says what to build; it answers "ready".
Every further line is a job, and is answered with a JSON object: what the run took. Prompts are
texts, or lists of token ids. A job of "ceiling" steps is the device alone (`ceiling.py`).
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import jax

from benchmarks import simulated
from benchmarks.ceiling import back_to_back
from enginepool.config import PoolConfig
from enginepool.devices import resolve_devices

# How long an idle engine of upstream's sleeps; by itself it would spin and starve its siblings.
_PARKED_SECONDS = 0.001


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever else is printed is no answer
    setup = json.loads(sys.stdin.readline())
    accelerator = simulated.install(hollow=setup["hollow"])
    engines: _Engines = _Pool(setup) if setup["kind"] == "pool" else _Upstream(setup)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        engines.flush()
        accelerator.reset(job["step_ms"] / 1000)
        with _host(job.get("host")) as rounds:
            before, threads = _peak_mb(), engines.thread_seconds()
            decoded = engines.decode_steps()
            cpu, started = time.process_time(), time.perf_counter()
            tokens = engines.generate(job)
            wall, cpu = time.perf_counter() - started, time.process_time() - cpu
            done = rounds()
            thread, flights = _since(threads, engines.thread_seconds())
            steady, fallback = _since(decoded, engines.decode_steps())
        answer = {
            "tokens": tokens,
            "grown_mb": _peak_mb() - before,
            "cpu_ms_per_step": 1000 * cpu / accelerator.steps,
            "thread_ms_per_step": 1000 * thread / accelerator.steps,
            "steady_ms_per_step": 1000 * flights / max(1, steady),
            "fallback_share": fallback / max(1, steady + fallback),
            "host_rounds_per_sec": done / wall,
            "busy_share": accelerator.busy_share(setup["engines"]),
            **simulated.figures(accelerator, tokens),
        }
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # upstream's threads cannot be stopped


class _Engines(Protocol):
    def generate(self, job: dict[str, Any]) -> int:
        """Do the job; returns how many tokens came."""
        ...

    def flush(self) -> None: ...

    def thread_seconds(self) -> tuple[float, float]:
        """Processor time of the engines' own threads, and of a pool's the part that steady decode
        takes, with whoever joins; 0 where they cannot be asked."""
        ...

    def decode_steps(self) -> tuple[int, int]:
        """Of a pool: those that stayed on their device, and upstream's own."""
        ...


class _Pool:
    def __init__(self, setup: dict[str, Any]) -> None:
        from enginepool import EnginePool

        options = dict(setup["server_args"])
        if (most := setup["max_decode_steps"]) is not None:
            options["max_decode_steps"] = most
        if (turns := setup["turns"]) is not None:
            from enginepool.engine import pinned_engine
            from enginepool.engine.gil_limiter import STEP_PATIENCE, Limiter

            limiter = Limiter(turns or sys.maxsize, STEP_PATIENCE)
            pinned_engine.process_limiter = lambda: limiter
        self._pool = EnginePool(setup["model"], devices=setup["engines"], **options).open()
        self._workers = self._pool.runtime.workers
        self._in_flights = [_timed(worker.scheduler.steady) for worker in self._workers]

    def generate(self, job: dict[str, Any]) -> int:
        if steps := job.get("ceiling"):
            worker = self._workers[0]
            worker.channel.run(lambda: back_to_back(worker.scheduler, steps)).result()
            return steps
        texts, ids = _texts_or_ids(job["prompts"])
        if job.get("streams"):
            chunks = self._pool.stream(texts, job["params"], input_ids=ids)
            ends = [chunk for chunk in chunks if chunk["meta_info"]["finish_reason"]]
            return sum(end["meta_info"]["completion_tokens"] for end in ends)
        results = self._pool.generate_all(texts, job["params"], input_ids=ids)
        return sum(result["meta_info"]["completion_tokens"] for result in results)

    def flush(self) -> None:
        self._pool.flush_cache()

    def thread_seconds(self) -> tuple[float, float]:
        times = [worker.channel.run(time.thread_time) for worker in self._workers]
        threads = sum(future.result() for future in times)
        return threads, sum(seconds() for seconds in self._in_flights)  # now they have landed

    def decode_steps(self) -> tuple[int, int]:
        engines = self._pool.stats()["engines"]
        steady, fallback = ([e[key] for e in engines] for key in ("steady_steps", "fallback_steps"))
        return sum(steady), sum(fallback)


class _Upstream:
    def __init__(self, setup: dict[str, Any]) -> None:
        # What engines cannot run without has been repaired; what makes ours faster is ours.
        config = PoolConfig(setup["model"], server_args=setup["server_args"])
        groups = resolve_devices(setup["engines"], 1)
        # An engine's event loop belongs to the thread that built it, so each has its thread.
        self._threads = [ThreadPoolExecutor(1) for _ in groups]
        overlap = setup["kind"] == "upstream"
        self._engines = [
            thread.submit(_engine, config, index, group[0].platform, overlap).result()
            for index, (thread, group) in enumerate(zip(self._threads, groups, strict=True))
        ]

    def generate(self, job: dict[str, Any]) -> int:
        texts, ids = _texts_or_ids(job["prompts"])
        count = len(self._engines)
        futures = [
            thread.submit(
                engine.generate,
                texts and texts[index::count],
                job["params"][index::count],
                input_ids=ids and ids[index::count],
            )
            for index, (thread, engine) in enumerate(zip(self._threads, self._engines, strict=True))
        ]
        results = [result for future in futures for result in future.result()]
        return sum(result["meta_info"]["completion_tokens"] for result in results)

    def flush(self) -> None:
        for thread, engine in zip(self._threads, self._engines, strict=True):
            thread.submit(engine.flush_cache).result()

    def thread_seconds(self) -> tuple[float, float]:
        return 0.0, 0.0

    def decode_steps(self) -> tuple[int, int]:
        return 0, 0


def _timed(steady: Any) -> Callable[[], float]:
    """Have an engine's flights add up their processor time; returns what tells it, in seconds."""
    seconds, run = 0.0, steady.run

    def timed(batch: Any) -> bool:
        nonlocal seconds
        began = time.thread_time()
        flown: bool = run(batch)
        seconds += flown * (time.thread_time() - began)
        return flown

    steady.run = timed
    return lambda: seconds


def _since(before: tuple[Any, Any], now: tuple[Any, Any]) -> tuple[Any, Any]:
    return now[0] - before[0], now[1] - before[1]


def _engine(config: PoolConfig, index: int, platform: str, overlap: bool) -> Any:
    from sgl_jax.srt.entrypoints.engine import Engine

    # The very options that the pool gives its engines, save who compiles and, by default, overlap.
    args = config.for_engine(platform, [index]) | {"disable_precompile": False}
    engine = Engine(**args | {"disable_overlap_schedule": not overlap})
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
