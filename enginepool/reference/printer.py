"""Prints phases as JSON lines, with memory, and checks conditions between phases."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from enginepool.console.complaints import complain
from enginepool.runtime import statistics


class Printer:
    """Prints phases to standard output as they happen, and failed checks to standard error.

    Attributes:
        sink: Called with the number and the record of every phase. None: nothing is called.
        failed: Messages of the checks that failed.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._devices = devices
        self._started = time.perf_counter()
        self._count = 0
        self.sink: Callable[[int, dict[str, Any]], None] | None = None
        self.failed: list[str] = []

    def phase(self, name: str, /, **fields: Any) -> int:
        """Print a phase; returns the bytes in use on all devices.

        Before the call, drop the references to arrays that should not count. Garbage is collected
        here.
        """
        elapsed = time.perf_counter() - self._started
        memory = _snapshot(self._devices)
        record = {"phase": name, **fields, "elapsed_s": elapsed, "memory": memory}
        print(json.dumps(record, ensure_ascii=False), flush=True)
        if self.sink is not None:
            self.sink(self._count, record)
        self._count += 1
        return memory["jax_device_memory_summary"]["bytes_in_use_sum"]

    def determinism(self, same_output: bool, first: str, second: str) -> None:
        """Print the line that compares two outputs by their hashes. It is the only line that is not
        JSON."""
        print(
            f"[determinism] same_output={int(same_output)} "
            f"output1_sha256={first} output2_sha256={second}",
            flush=True,
        )

    def check(self, holds: bool, message: str) -> None:
        """Remember and print a check that failed. The run goes on: later phases may tell why."""
        if not holds:
            self.failed.append(message)
            complain(f"check failed: {message}")

    def check_bytes(self, got: int, expected: int, what: str) -> None:
        """Bytes must be equal on CPU. Elsewhere compiled programs are in device memory too, so
        bytes may differ by a hundredth."""
        slack = 0 if self._devices[0].platform == "cpu" else expected // 100
        self.check(
            abs(got - expected) <= slack,
            f"{what}: {got} bytes, expected {expected} ({got - expected:+d})",
        )


def _snapshot(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """The memory object of the original scripts: process, each device, and the sum, minimum and
    maximum of all devices."""
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


def _summary(by_device: Sequence[dict[str, int]]) -> dict[str, int]:
    names = [name for name in by_device[0] if all(name in entry for entry in by_device)]
    return {
        f"{name}_{kind}": reduce(entry[name] for entry in by_device)
        for name in names
        for kind, reduce in (("sum", sum), ("min", min), ("max", max))
    }
