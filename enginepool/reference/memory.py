"""Device and process memory at a moment, in the shape that the reference's runs print."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import jax

from enginepool.runtime import statistics

# An engine's thread lets go of its last step's arrays a moment after the caller has its output.
_SETTLE_SECONDS = 2.0


def snapshot(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """The reference's memory object: process, each device, and sum, least and most of all.

    Waits until two looks in a row agree, so that what is in flight is not counted.
    """
    end = time.monotonic() + _SETTLE_SECONDS
    before, now = None, _look(devices)
    while before != now["devices"] and time.monotonic() < end:
        before = now["devices"]
        time.sleep(0.01)
        now = _look(devices)
    by_device = [
        {name: value for name, value in entry.items() if name != "device"}
        for entry in now["devices"]
    ]
    return {
        "process_rss_bytes": now["process_rss_bytes"],
        "jax_device_memory_stats": by_device,
        "jax_device_memory_summary": _summary(by_device),
    }


def in_use(memory: dict[str, Any]) -> int:
    """Bytes in use on all devices of a snapshot."""
    return memory["jax_device_memory_summary"]["bytes_in_use_sum"]


def _look(devices: Sequence[jax.Device]) -> dict[str, Any]:
    gc.collect()  # arrays that only a reference cycle keeps
    return statistics.memory(list(devices))


def _summary(by_device: Sequence[dict[str, int]]) -> dict[str, int]:
    names = [name for name in by_device[0] if all(name in entry for entry in by_device)]
    return {
        f"{name}_{kind}": reduce(entry[name] for entry in by_device)
        for name in names
        for kind, reduce in (("sum", sum), ("min", min), ("max", max))
    }
