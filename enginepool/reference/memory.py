"""Device and process memory at a moment, in the shape that the reference's runs print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from enginepool.runtime import statistics


def snapshot(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """The reference's memory object: process, each device, and sum, least and most of all."""
    now = statistics.settled_memory(list(devices))
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


def _summary(by_device: Sequence[dict[str, int]]) -> dict[str, int]:
    names = [name for name in by_device[0] if all(name in entry for entry in by_device)]
    return {
        f"{name}_{kind}": reduce(entry[name] for entry in by_device)
        for name in names
        for kind, reduce in (("sum", sum), ("min", min), ("max", max))
    }
