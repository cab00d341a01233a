"""The process of one part of `benchmarks.device`: `python -m benchmarks.device_parts JOB`.

It prints what a stage of the first run prints (enginepool/doctor/first_run/stages.py).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.device_load import WORKLOADS, options, requests
from enginepool.doctor.first_run.checklist import Checklist, Finding
from enginepool.doctor.first_run.stages import Line, standard_output

Job = dict[str, Any]
_TRACED_SECONDS = 2.0


def main(job: Job, line: Line) -> None:
    checklist = Checklist(job["seconds"], line)
    plan, run = _PARTS[job["stage"]]
    line({"plan": plan})
    run(job, checklist)


def _devices(_: Job, checklist: Checklist) -> None:
    def look(found: Finding) -> None:
        import jax

        first, *_ = devices = jax.devices()
        found.seen |= {"platform": first.platform, "kind": first.device_kind}
        found.seen |= {"count": len(devices), "memory": first.memory_stats()}

    checklist.run("devices", look)


def _exact(job: Job, checklist: Checklist) -> None:
    from benchmarks.device_exact import float32

    checklist.run("exact", partial(float32, job))


def _pool(job: Job, checklist: Checklist) -> None:
    from benchmarks import device_pool

    checks = {
        "swaps": device_pool.swaps,
        "bfloat16": device_pool.bfloat16,
        "fault": device_pool.fault,
        "kv": device_pool.kv,
        "memory": device_pool.memory,
        "busy": lambda job, pool, found: _busy(job, pool.generate_all, found),
    }
    _open_pool(job, checklist, "pool", 1, checks)


def _all(job: Job, checklist: Checklist) -> None:
    _open_pool(job, checklist, "all", None, {})


def _open_pool(
    job: Job,
    checklist: Checklist,
    name: str,
    devices: int | None,
    checks: dict[str, Callable[[Job, Any, Finding], None]],
) -> None:
    from benchmarks import device_pool

    pools: list[Any] = []
    how: dict[str, Any] = {"warmup": "parallel"} if devices is None else {}
    opening = partial(device_pool.start, job, pools, devices=devices, **how)
    if not checklist.run(f"{name}_start", opening):
        for rest in _PARTS[name][0][1:]:
            checklist.skip(rest, "the pool did not open")
        return
    with pools[0] as pool:
        _speeds(job, checklist, name, pool.generate_all, len(pool.engines))
        for check, look in checks.items():
            checklist.run(f"{name}_{check}", partial(look, job, pool))


def _upstream(job: Job, checklist: Checklist) -> None:
    name, engines = job["stage"], []

    def start(found: Finding) -> None:
        from sgl_jax.srt.entrypoints.engine import Engine

        from enginepool.config import PoolConfig

        config = PoolConfig(job["model"], server_args=options(small=job["small"]))
        # The options that the pool gives its engine, except for compilation, overlap scheduling and
        # processes.
        args = config.for_engine(job["platform"], [0]) | {
            "disable_precompile": False,
            "disable_overlap_schedule": False,
            "enable_single_process": name == "single",
        }
        if name == "default":
            del args["device_indexes"]
        started = time.perf_counter()
        engines.append(Engine(**args))
        engines[0].generate(input_ids=[[1, 2, 3]], sampling_params={"max_new_tokens": 1})
        found.seen["seconds"] = time.perf_counter() - started

    if not checklist.run(f"{name}_start", start):
        for rest in _PARTS[name][0][1:]:
            checklist.skip(rest, "the Engine did not start")
        return
    _speeds(job, checklist, name, engines[0].generate, 1)
    if name == "single":  # the profiler sees this process only
        checklist.run("single_busy", partial(_busy, job, engines[0].generate))


def _busy(job: Job, generate: Callable[..., Any], found: Finding) -> None:
    """The device's busy share in decode. Last: a process was seen to end under the profiler."""
    from benchmarks.device_busy import busy_share

    prompts, params = requests("decode", _vocab_size(job), 1, small=job["small"])
    with tempfile.TemporaryDirectory(prefix="device-trace-") as folder:
        found.seen |= busy_share(
            Path(folder),
            0.1 if job["small"] else _TRACED_SECONDS,
            lambda: generate(input_ids=prompts, sampling_params=params),
        )


def _speeds(
    job: Job, checklist: Checklist, name: str, generate: Callable[..., Any], engines: int
) -> None:
    def speed(kind: str, found: Finding) -> None:
        prompts, params = requests(kind, _vocab_size(job), engines, small=job["small"])
        runs, tokens = [], 0
        for _ in range(2):
            started = time.perf_counter()
            results = generate(input_ids=prompts, sampling_params=params)
            seconds = time.perf_counter() - started
            tokens = sum(result["meta_info"]["completion_tokens"] for result in results)
            runs.append(tokens / seconds)
        wanted = sum(each["max_new_tokens"] for each in params)
        found.seen |= {"tokens": tokens, "runs": runs, "tokens_per_second": max(runs)}
        found.expect(tokens == wanted, f"{tokens} tokens came of {wanted}")

    for kind in WORKLOADS:
        checklist.run(f"{name}_{kind}", partial(speed, kind))


def _vocab_size(job: Job) -> int:
    return json.loads(Path(job["model"], "config.json").read_text(encoding="utf-8"))["vocab_size"]


def _named(name: str, *checks: str) -> list[str]:
    return [f"{name}_{check}" for check in ("start", *WORKLOADS, *checks)]


_POOL_CHECKS = ("swaps", "bfloat16", "fault", "kv", "memory", "busy")
_PARTS: dict[str, tuple[list[str], Callable[[Job, Checklist], None]]] = {
    "devices": (["devices"], _devices),
    "exact": (["exact"], _exact),
    "pool": (_named("pool", *_POOL_CHECKS), _pool),
    "single": (_named("single", "busy"), _upstream),
    "default": (_named("default"), _upstream),
    "all": (_named("all"), _all),
}

if __name__ == "__main__":
    main(json.loads(sys.argv[1]), standard_output())
    os._exit(0)  # upstream's threads cannot be stopped
