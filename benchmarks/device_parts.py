"""The process of one part of `benchmarks.device`: `python -m benchmarks.device_parts JOB`.

It prints what a stage of the first run prints (enginepool/doctor/first_run/stages.py).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.device_load import WORKLOADS, options, requests
from enginepool.doctor.first_run.checklist import Checklist, Finding
from enginepool.doctor.first_run.stages import Line, standard_output

Job = dict[str, Any]


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
        "memory": device_pool.memory,
        "busy": device_pool.busy,
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
        for rest in [*WORKLOADS, *checks]:
            checklist.skip(f"{name}_{rest}", "the pool did not open")
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
        for kind in WORKLOADS:
            checklist.skip(f"{name}_{kind}", "the Engine did not start")
        return
    _speeds(job, checklist, name, engines[0].generate, 1)


def _speeds(
    job: Job, checklist: Checklist, name: str, generate: Callable[..., Any], engines: int
) -> None:
    def speed(kind: str, found: Finding) -> None:
        with open(os.path.join(job["model"], "config.json"), encoding="utf-8") as file:
            vocab_size = json.load(file)["vocab_size"]
        prompts, params = requests(kind, vocab_size, engines, small=job["small"])
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


def _named(name: str, *checks: str) -> list[str]:
    return [f"{name}_{check}" for check in ("start", *WORKLOADS, *checks)]


_POOL_CHECKS = ("swaps", "bfloat16", "fault", "memory", "busy")
_PARTS: dict[str, tuple[list[str], Callable[[Job, Checklist], None]]] = {
    "devices": (["devices"], _devices),
    "exact": (["exact"], _exact),
    "pool": (_named("pool", *_POOL_CHECKS), _pool),
    "single": (_named("single"), _upstream),
    "default": (_named("default"), _upstream),
    "all": (_named("all"), _all),
}

if __name__ == "__main__":
    main(json.loads(sys.argv[1]), standard_output())
    os._exit(0)  # upstream's threads cannot be stopped
