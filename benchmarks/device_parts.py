"""The process of one part of `benchmarks.device`: `python -m benchmarks.device_parts JOB`.

It prints what a stage of the first run prints (enginepool/doctor/first_run/stages.py).
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from enginepool.doctor.first_run.checklist import Checklist, Finding
from enginepool.doctor.first_run.stages import Line, standard_output

Job = dict[str, Any]
_BATCH, _SMALL_BATCH = 64, 4
_WORKLOADS = ("decode", "sampled", "arrivals")
_SWAPS = 3  # of each source, after one that compiles
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

    checklist.run("exact", partial(float32, job, _server_args(job)))


def _pool(job: Job, checklist: Checklist) -> None:
    from benchmarks.opening import first_token

    name, pools = job["stage"], list[Any]()
    how: Job = {"devices": 1} if name == "pool" else {"devices": None, "warmup": "parallel"}

    def start(found: Finding) -> None:
        pool, found.seen = first_token(job["model"], **how, **_server_args(job))
        pools.append(pool)

    if not _started(name, checklist, start):
        return
    with pools[0] as pool:
        _speeds(job, checklist, pool.generate_all, len(pool.engines))
        if name == "pool":
            checklist.run("pool_swaps", partial(_swaps, job, pool))
            checklist.run("pool_memory", partial(_memory, pool))
            checklist.run("pool_bfloat16", partial(_bfloat16, job, pool))
            checklist.run("pool_fault", partial(_fault, job, pool))
            checklist.run("pool_kv", partial(_kv, job, pool))
            checklist.run("pool_busy", partial(_busy, job, pool.generate_all))


def _upstream(job: Job, checklist: Checklist) -> None:
    from benchmarks.opening import upstreams_first_token

    name, engines = job["stage"], list[Any]()
    processes = {"enable_single_process": False, "device_indexes": None}

    def start(found: Finding) -> None:
        how = {"platform": job["platform"]} | (processes if name == "default" else {})
        engine, found.seen = upstreams_first_token(job["model"], _server_args(job), **how)
        engines.append(engine)

    if not _started(name, checklist, start):
        return
    _speeds(job, checklist, engines[0].generate, 1)
    if name == "single":  # the profiler sees this process only
        checklist.run("single_busy", partial(_busy, job, engines[0].generate))


def _started(name: str, checklist: Checklist, start: Callable[[Finding], None]) -> bool:
    started = checklist.run(f"{name}_start", start)
    for rest in [] if started else _PARTS[name][0][1:]:
        checklist.skip(rest, "it did not start")
    return started


def _speeds(job: Job, checklist: Checklist, generate: Callable[..., Any], engines: int) -> None:
    def speed(kind: str, found: Finding) -> None:
        prompts, params = _requests(job, kind, engines)
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

    for kind in _WORKLOADS:
        checklist.run(f"{job['stage']}_{kind}", partial(speed, kind))


def _swaps(job: Job, pool: Any, found: Finding) -> None:
    """New weights by source, beside plain JAX that does the same in two calls."""
    import jax

    from benchmarks.synthetic import leaf, read_model

    device = pool.runtime.workers[0].devices[0]
    _, host = read_model(Path(job["model"]))
    on_device = jax.block_until_ready(jax.device_put(host, device))
    turned = jax.jit(lambda tensors: {n: a.T if leaf(n)[1] else a + 0 for n, a in tensors.items()})
    gb = found.seen["gb"] = sum(tensor.nbytes for tensor in host.values()) / 1e9
    kinds: Mapping[str, tuple[Any, Callable[[], Any]]] = {
        "on the device": (on_device, lambda: turned(on_device)),
        "NumPy": (host, lambda: turned(jax.device_put(host, device))),
        "files": (job["model"], lambda: turned(jax.device_put(read_model(Path(job["model"]))[1]))),
    }
    sources = found.seen["sources"] = {}
    for name, (source, plain_jax) in kinds.items():
        reports = [pool.update_weights(source) for _ in range(1 + _SWAPS)]
        plain = [_seconds(lambda run=plain_jax: jax.block_until_ready(run())) for _ in reports]
        seconds = [report.seconds["stage"] + report.seconds["commit"] for report in reports]
        sources[name] = {
            "gb_per_second": gb / statistics.median(seconds[1:]),
            "plain_gb_per_second": gb / statistics.median(plain[1:]),
            "reports": [dict(report.seconds) for report in reports],
        }


def _memory(pool: Any, found: Finding) -> None:
    found.seen |= pool.stats()["memory"]
    found.seen["gb"] = found.seen["sum"]["bytes_in_use"] / 1e9


def _bfloat16(job: Job, pool: Any, found: Finding) -> None:
    """How far bfloat16's log-probabilities are from float32's. Other ids are no error."""
    import jax

    from benchmarks.device_exact import compare

    with jax.default_matmul_precision("highest"):  # of the reference on this thread
        compare(job, pool, found)


def _fault(job: Job, pool: Any, found: Finding) -> None:
    """A step raises. The engine must serve again, and every prompt must have its whole answer."""
    before, events = _answers(job, pool), len(pool.events())
    program = pool.runtime.workers[0].scheduler.steady.program

    def fail(*_: Any, **__: Any) -> None:
        del program.step  # once
        raise RuntimeError("a step of the benchmark fails")

    program.step = fail
    after = _answers(job, pool)
    down, *_, up = pool.events()[events:]
    found.seen |= {"seconds": up["time"] - down["time"], "by": up.get("by")}
    found.expect(up["event"] == "engine_recovered", f"the last event is {up['event']}")
    found.expect(list(map(len, after)) == list(map(len, before)), "an answer is not whole")


def _kv(job: Job, pool: Any, found: Finding) -> None:
    """The KV cache is released and made again. The outputs must be those of before."""
    before, sizes = _answers(job, pool), list[int]()
    for name in ("release", "resume"):
        change = getattr(pool, f"{name}_memory_occupation")
        found.seen[f"{name}_seconds"] = _seconds(lambda run=change: sizes.append(run()))
    released, resumed = sizes
    found.seen["gb"] = released / 1e9
    found.expect(resumed == released > 0, f"{released} bytes were released, {resumed} made again")
    found.expect(_answers(job, pool) == before, "the outputs differ")


def _answers(job: Job, pool: Any) -> list[list[int]]:
    prompts, params = _requests(job, "decode", 1)
    pool.flush_cache()
    return [r["output_ids"] for r in pool.generate_all(input_ids=prompts, sampling_params=params)]


def _busy(job: Job, generate: Callable[..., Any], found: Finding) -> None:
    """The device's busy share in decode. It comes last, because a process once crashed under the
    profiler."""
    from benchmarks.device_busy import busy_share

    prompts, params = _requests(job, "decode", 1)
    with tempfile.TemporaryDirectory(prefix="device-trace-") as folder:
        found.seen |= busy_share(
            Path(folder),
            0.1 if job["small"] else _TRACED_SECONDS,
            lambda: generate(input_ids=prompts, sampling_params=params),
        )


def _server_args(job: Job) -> dict[str, Any]:
    """For the pool and for upstream: one batch size, one size of prefill."""
    batch, prefill, context = (_SMALL_BATCH, 64, 64) if job["small"] else (_BATCH, 2048, 1024)
    return {
        "dtype": "bfloat16",
        "context_length": context,
        "max_total_tokens": batch * context,
        "max_running_requests": batch,
        "max_prefill_tokens": prefill,
        "chunked_prefill_size": prefill,
        "precompile_bs_paddings": [batch],
        "precompile_token_paddings": [prefill],
    }


def _requests(job: Job, kind: str, engines: int) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Prompts and parameters. "arrivals" has three times what the batches hold, uneven."""
    rng, config = random.Random(7), Path(job["model"], "config.json").read_text(encoding="utf-8")
    vocabulary = json.loads(config)["vocab_size"]
    batch, prompt, output = (_SMALL_BATCH, 8, 16) if job["small"] else (_BATCH, 128, 256)
    uneven = kind == "arrivals"
    prompts = [
        [rng.randrange(vocabulary) for _ in range(rng.randint(4, 2 * prompt) if uneven else prompt)]
        for _ in range(engines * batch * (3 if uneven else 1))
    ]
    params = [
        {
            "temperature": 0.0 if kind == "decode" else 1.0,
            "max_new_tokens": rng.randint(output // 8, output) if uneven else output,
            "ignore_eos": True,
        }
        for _ in prompts
    ]
    return prompts, params


def _seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _named(name: str, *checks: str) -> list[str]:
    return [f"{name}_{check}" for check in ("start", *_WORKLOADS, *checks)]


_PARTS: dict[str, tuple[list[str], Callable[[Job, Checklist], None]]] = {
    "devices": (["devices"], _devices),
    "exact": (["exact"], _exact),
    "pool": (_named("pool", "swaps", "memory", "bfloat16", "fault", "kv", "busy"), _pool),
    "single": (_named("single", "busy"), _upstream),
    "default": (_named("default"), _upstream),
    "all": (_named("all"), _pool),
}

if __name__ == "__main__":
    main(json.loads(sys.argv[1]), standard_output())
    os._exit(0)  # upstream's threads cannot be stopped
