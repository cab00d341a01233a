"""The checks of a pool in bfloat16 that `benchmarks.device` makes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from benchmarks.device_exact import compared
from benchmarks.device_load import options, requests
from benchmarks.synthetic import leaf, read_model
from enginepool import EnginePool
from enginepool.doctor.first_run.checklist import Finding
from tests.support import faults

Job = dict[str, Any]
_SWAPS = 3  # of each source, after one that compiles


def start(
    job: Job, pools: list[EnginePool], found: Finding, *, devices: int | None, **how: Any
) -> None:
    """Open a pool; from the constructor to the first token, after upstream's imports."""
    import patches

    applied = patches.apply()  # upstream's imports, without their side effects
    import sgl_jax.srt.entrypoints.engine  # noqa: F401

    patches.revert(applied)
    jax.devices()
    started = time.perf_counter()
    pool = EnginePool(job["model"], devices=devices, **options(small=job["small"]), **how)
    pools.append(pool)
    pool.generate_all(input_ids=[[1, 2, 3]], sampling_params={"max_new_tokens": 1})
    found.seen["seconds"] = time.perf_counter() - started
    stats = pool.stats()
    found.seen["start"] = stats["start"]
    found.seen["engines"] = [
        {key: engine[key] for key in ("build_seconds", "warmup_seconds", "start")}
        for engine in stats["engines"]
    ]


def swaps(job: Job, pool: EnginePool, found: Finding) -> None:
    """New weights by source, beside plain JAX that does the same in two calls."""
    device = pool.runtime.workers[0].devices[0]
    _, host = read_model(Path(job["model"]))
    on_device = jax.block_until_ready(jax.device_put(host, device))
    turned = jax.jit(lambda tensors: {n: a.T if leaf(n)[1] else a + 0 for n, a in tensors.items()})
    gb = sum(tensor.nbytes for tensor in host.values()) / 1e9
    found.seen["gb"] = gb
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
            "first_seconds": seconds[0],
            "reports": [dict(report.seconds) for report in reports],
        }


def bfloat16(job: Job, pool: EnginePool, found: Finding) -> None:
    """How far bfloat16's log-probabilities are from float32's; different ids are no error."""
    errors, wrong = compared(job, pool)
    found.seen |= {"mean_error": float(errors.mean()), "largest_error": float(errors.max())}
    found.seen |= {"outputs_with_other_ids": wrong}


def fault(job: Job, pool: EnginePool, found: Finding) -> None:
    """A step raises. The engine must come back, and the outputs must be those of a run without the
    fault."""
    before, events = _answers(job, pool), len(pool.events())
    faults.raise_in_step(pool, 0, 3)
    same = _answers(job, pool) == before
    down, *_, up = pool.events()[events:]
    found.seen |= {"seconds": up["time"] - down["time"], "by": up.get("by")}
    found.expect(up["event"] == "engine_recovered", f"the last event is {up['event']}")
    found.expect(same, "the outputs differ")


def kv(job: Job, pool: EnginePool, found: Finding) -> None:
    """The KV cache is released and made again. The outputs must be those of before."""
    before = _answers(job, pool)
    started = time.perf_counter()
    released = pool.release_memory_occupation()
    between = time.perf_counter()
    resumed = pool.resume_memory_occupation()
    found.seen |= {"release_seconds": between - started, "gb": released / 1e9}
    found.seen["resume_seconds"] = time.perf_counter() - between
    found.expect(resumed == released > 0, f"{released} bytes were released, {resumed} made again")
    found.expect(_answers(job, pool) == before, "the outputs differ")


def memory(_: Job, pool: EnginePool, found: Finding) -> None:
    found.seen |= pool.stats()["memory"]
    found.seen["gb"] = found.seen["sum"]["bytes_in_use"] / 1e9


def _answers(job: Job, pool: EnginePool) -> list[list[int]]:
    prompts, params = requests("decode", _vocab_size(pool), 1, small=job["small"])
    pool.flush_cache()
    return [r["output_ids"] for r in pool.generate_all(input_ids=prompts, sampling_params=params)]


def _vocab_size(pool: EnginePool) -> int:
    return pool.runtime.input_processor.limits.vocab_size


def _seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
