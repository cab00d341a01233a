"""Swaps weights and back, and releases the KV cache and makes it again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from enginepool import toy
from enginepool.doctor.first_run.checklist import Finding
from enginepool.doctor.first_run.goldens import GREEDY, PROMPTS, differing, serving
from enginepool.runtime import statistics

if TYPE_CHECKING:
    from enginepool.pool.pool import EnginePool

# A device rounds its allocations up, and other small ones come and go.
_ROUNDING = 0.1


def swap(pool: EnginePool, found: Finding) -> None:
    """Replace the weights that add by weights that subtract, and swap back. Every engine must
    follow."""
    first = found.seen["checksum"] = pool.checksum()
    updates = found.seen["updates"] = []
    for name in ("subtract", "add"):
        report = pool.update_weights(toy.checkpoint(name))
        checksum = pool.checksum()
        updates.append(
            {
                "to": name,
                "staging": report.staging,
                "seconds": report.seconds,
                "pause_seconds": [engine.pause_sec for engine in report.engines],
                "bytes_an_engine": report.nbytes,
                "bytes_per_second": report.gb_per_sec * 1e9,
                "checksum": checksum,
                "failed": report.failed,
            }
        )
        for index, why in report.failed.items():
            found.problems.append(f"engine {index} did not get the weights of {name}: {why}")
        found.expect(
            checksum == report.staged, f"{name}: checksum {checksum}, {report.staged} was staged"
        )
        found.problems += answers(pool, name)
    there, back = (update["checksum"] for update in updates)
    found.expect(there != first, "the checksum did not change with the weights")
    found.expect(back == first, f"checksum {back} after the swap back, {first} before")


def kv_cycle(pool: EnginePool, found: Finding) -> None:
    """Give the KV caches' memory back and make them again; answers must be as before."""
    pool.flush_cache()
    used = [_in_use(pool)]
    started = time.perf_counter()
    released = pool.release_memory_occupation()
    between = time.perf_counter()
    used.append(_in_use(pool))
    resuming = time.perf_counter()
    resumed = pool.resume_memory_occupation()
    found.seen |= {
        "released_bytes": released,
        "resumed_bytes": resumed,
        "release_seconds": between - started,
        "resume_seconds": time.perf_counter() - resuming,
    }
    used.append(_in_use(pool))
    found.seen["bytes_in_use"] = dict(zip(("before", "released", "resumed"), used, strict=True))
    found.expect(released > 0, "no bytes were released")
    found.expect(resumed == released, f"{resumed} of {released} bytes were made again")
    for what, there, here in (("freed", 0, 1), ("taken again", 2, 1)):
        difference = used[there] - used[here]
        found.expect(
            abs(difference - released) <= _ROUNDING * released,
            f"{difference} bytes of device memory were {what}, {released} should be",
        )
    found.problems += answers(pool, "add")


def answers(pool: EnginePool, name: str) -> list[str]:
    """The wrong answers of every engine that serves, one engine after the other."""
    engines: list[Any] = pool.engines
    return [
        wrong
        for index in serving(pool)
        for wrong in differing(engines[index].generate(PROMPTS, GREEDY), name)
    ]


def _in_use(pool: EnginePool) -> int:
    devices = [device for worker in pool.runtime.workers for device in worker.devices]
    return statistics.settled_memory(devices)["sum"]["bytes_in_use"]
