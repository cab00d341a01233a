"""A process of a contestant (`contestant.py`): a pool, or an engine of upstream.

The first line of standard input is a JSON object that says what to build. The answer is "ready".
All further lines are jobs. The answer to a job is a JSON object with what the run took. A job of
"ceiling" steps is the device alone: one decode program, dispatched again and again.

Setup: `name` (of the contestant), `engines`, `model`, `server_args`.
"""

from __future__ import annotations

import json
import operator
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from benchmarks import simulated
from benchmarks.opening import upstreams_engine

# How long an idle engine of upstream's sleeps. Without it the engine spins and starves others.
_PARKED_SECONDS = 0.001
# Steps of the ceiling that are dispatched ahead. More make the device no busier.
_AHEAD = 4


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever else is printed is no answer
    setup = json.loads(sys.stdin.readline())
    accelerator = simulated.install()
    engines = _Pool(setup) if setup["name"] == "pool" else _Upstream(setup)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        answer = _run(json.loads(line), engines, accelerator, setup["engines"])
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # upstream's threads cannot be stopped


def _run(
    job: dict[str, Any], engines: _Pool | _Upstream, accelerator: simulated.Accelerator, count: int
) -> dict[str, float]:
    engines.flush()
    accelerator.reset(job["step_ms"] / 1000)
    decoded = engines.decode_steps()
    cpu = time.process_time()
    tokens = engines.generate(job)
    cpu = time.process_time() - cpu
    steady, fallback = map(operator.sub, engines.decode_steps(), decoded)
    return {
        "tokens": tokens,
        "cpu_ms_per_step": 1000 * cpu / accelerator.steps,
        "fallback_share": fallback / max(1, steady + fallback),
        "busy_share": accelerator.busy_share(count),
    }


class _Pool:
    def __init__(self, setup: dict[str, Any]) -> None:
        from enginepool import EnginePool

        self._pool = EnginePool(
            setup["model"], devices=setup["engines"], **setup["server_args"]
        ).open()
        self._workers = self._pool.runtime.workers

    def generate(self, job: dict[str, Any]) -> int:
        """Do the job. Returns the number of tokens."""
        if steps := job.get("ceiling"):
            worker = self._workers[0]
            worker.channel.run(lambda: _back_to_back(worker.scheduler, steps)).result()
            return steps
        prompts: dict[str, Any] = {"input_ids": job["prompts"], "sampling_params": job["params"]}
        results = self._pool.generate_all(**prompts)
        return sum(result["meta_info"]["completion_tokens"] for result in results)

    def flush(self) -> None:
        self._pool.flush_cache()

    def decode_steps(self) -> tuple[int, int]:
        """Steps of steady decode, and decode steps of upstream's own."""
        engines = self._pool.stats()["engines"]
        steady, fallback = ([e[key] for e in engines] for key in ("steady_steps", "fallback_steps"))
        return sum(steady), sum(fallback)


def _back_to_back(scheduler: Any, steps: int) -> None:
    """Run the largest decode program again and again on an idle engine. Its KV cache is spoilt."""
    from sgl_jax.srt.layers.logits_processor import LogitsMetadata
    from sgl_jax.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    worker = scheduler.tp_worker.worker
    runner, manager = worker.model_runner, worker.compilation_manager
    size, places = manager.bs_buckets[-1], manager.cache_loc_buckets[-1]
    batch = manager._make_dummy_batch(
        size, size, ForwardMode.DECODE, places, dp_size=1, per_dp_bs_size=size
    )
    forward_batch = ForwardBatch.init_new(batch, runner)
    runner.attn_backend.forward_metadata = runner.attn_backend.get_forward_metadata(batch)
    metadata = LogitsMetadata.from_model_worker_batch(batch, runner.mesh)
    results: list[Any] = []
    for _ in range(steps):
        output, *_ = runner.forward(forward_batch, logits_metadata=metadata)
        results.append(output.next_token_logits)
        if len(results) > _AHEAD:
            results.pop(0).block_until_ready()
    jax.block_until_ready(results)


class _Upstream:
    """Upstream's engine in its default, on a thread of its own, which runs its event loop."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._thread = ThreadPoolExecutor(1)
        made = self._thread.submit(upstreams_engine, setup["model"], setup["server_args"])
        self._engine = made.result()
        self._engine.scheduler_info["scheduler"].on_idle = lambda: time.sleep(_PARKED_SECONDS)

    def generate(self, job: dict[str, Any]) -> int:
        generate, prompts = self._engine.generate, job["prompts"]
        future = self._thread.submit(generate, None, job["params"], input_ids=prompts)
        return sum(result["meta_info"]["completion_tokens"] for result in future.result())

    def flush(self) -> None:
        self._thread.submit(self._engine.flush_cache).result()

    def decode_steps(self) -> tuple[int, int]:
        return 0, 0


if __name__ == "__main__":
    main()
