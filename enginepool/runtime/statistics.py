"""The dicts that `stats()` and `get_load()` return: numbers and words, for logs and W&B.

Counters are read from outside the engines' threads, one after the other. Each is exact; together
they may be of slightly different moments.
"""

from __future__ import annotations

import gc
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import jax
import psutil

if TYPE_CHECKING:
    from enginepool.engine.worker import EngineWorker
    from enginepool.runtime.runtime import Runtime

# An engine's thread drops the arrays of its last step a moment after the caller has its output.
_SETTLE_SECONDS = 2.0
_MEMORY = ("bytes_in_use", "peak_bytes_in_use", "bytes_limit", "largest_free_block_bytes")


def pool(runtime: Runtime) -> dict[str, Any]:
    return {
        "engines": [engine(worker) for worker in runtime.workers],
        "waiting": runtime.dispatch.waiting,
        "running": sum(worker.channel.running.unfinished for worker in runtime.workers),
        "finished": runtime.dispatch.counts.finished,
        "aborted": runtime.dispatch.counts.aborted,
        "prompt_tokens": runtime.dispatch.counts.prompt_tokens,
        "completion_tokens": runtime.dispatch.counts.completion_tokens,
        "weight_version": runtime.desired.weight_version,
        "start": start(runtime),
        **adapters(runtime),
        "executables": {"compiled": runtime.cache.compiled, "reused": runtime.cache.reused},
        "memory": memory([device for worker in runtime.workers for device in worker.devices]),
    }


def start(runtime: Runtime) -> dict[str, Any]:
    """The seconds of each stage of opening, and the errors of the matrices that it quantized."""
    seconds = {"seconds": dict(runtime.start.seconds)}
    errors = {path: asdict(its) for path, its in runtime.quantized.items()}
    return {**seconds, "quantized": errors} if errors else seconds


def adapters(runtime: Runtime) -> dict[str, Any]:
    """The adapters that are loaded, and which of them each engine has in its slots."""
    if not runtime.adapters.enabled:
        return {}
    slots = [w.scheduler.adapters if w.condition.reachable else None for w in runtime.workers]
    return {
        "lora_adapters": {
            adapter.name: {
                "weight_version": adapter.version,
                "rank": adapter.rank,
                "nbytes": adapter.nbytes,
                "engines": [i for i, mine in enumerate(slots) if mine and adapter in mine.held()],
            }
            for adapter in runtime.adapters.loaded()
        }
    }


def engine(worker: EngineWorker) -> dict[str, Any]:
    return {
        **load(worker),
        "devices": [device.id for device in worker.devices],
        "platform": worker.devices[0].platform,
        "matmul_precision": worker.assembly.precision.value or "default",
        "state": worker.condition.state.value,
        "reason": worker.condition.reason,
        "since": worker.condition.since,
        "steps": worker.channel.steps,
        "steady_steps": worker.channel.steady_steps,
        "steady_dispatches": worker.channel.steady_dispatches,
        "fallback_steps": worker.channel.fallback_steps,
        # Seconds from the first step after idling to the last end of a request. An idle engine
        # shows those of the last time that it worked.
        "busy_seconds": max(0.0, worker.channel.running.last_end - worker.channel.busy_since),
        "build_seconds": worker.assembly.build_seconds,
        "warmup_seconds": worker.assembly.warmup_seconds,
        "start": worker.assembly.start.report(),
    }


def load(worker: EngineWorker) -> dict[str, Any]:
    usage = worker.channel.kv_usage()
    return {
        "engine_index": worker.index,
        "running": worker.channel.running.unfinished,
        "kv_used_tokens": usage[0],
        "kv_total_tokens": usage[1],
    }


def memory(devices: list[jax.Device]) -> dict[str, Any]:
    """Bytes by device and their sum, and the memory of the process.

    Where the platform has no statistics (CPU), `bytes_in_use` is counted from live arrays. A buffer
    that several arrays share counts once.
    """
    by_device = []
    counted = None
    for device in devices:
        stats = device.memory_stats()
        if stats is None:
            if counted is None:
                counted = _live_bytes()
            stats = {"bytes_in_use": counted.get(device, 0)}
        by_device.append({"device": device.id, **{k: stats[k] for k in _MEMORY if k in stats}})
    summed = {
        name: sum(entry[name] for entry in by_device)
        for name in _MEMORY
        if all(name in entry for entry in by_device)
    }
    return {
        "devices": by_device,
        "sum": summed,
        "process_rss_bytes": psutil.Process().memory_info().rss,
    }


def settled_memory(devices: list[jax.Device]) -> dict[str, Any]:
    """`memory`, once it no longer changes. So arrays that a step is about to drop are not counted,
    nor are those that only a reference cycle keeps."""
    end = time.monotonic() + _SETTLE_SECONDS
    before, now = None, _collected(devices)
    while before != now["devices"] and time.monotonic() < end:
        before = now["devices"]
        time.sleep(0.01)
        now = _collected(devices)
    return now


def _collected(devices: list[jax.Device]) -> dict[str, Any]:
    gc.collect()
    return memory(devices)


def _live_bytes() -> dict[jax.Device, int]:
    buffers: dict[jax.Device, dict[int, int]] = {}
    for array in jax.live_arrays():
        try:
            # Shards only where there are several: looking at the shard of an array on one device
            # ties it into a reference cycle (JAX 0.8.1), which keeps its memory.
            parts = [array]
            if len(array.sharding.device_set) > 1:
                parts = [shard.data for shard in array.addressable_shards]
            for part in parts:
                (device,) = part.devices()
                buffers.setdefault(device, {})[part.unsafe_buffer_pointer()] = part.nbytes
        except RuntimeError:
            continue  # deleted, or given to a step that runs at this moment
    return {device: sum(sizes.values()) for device, sizes in buffers.items()}
