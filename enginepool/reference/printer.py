"""The one printer of phases: a JSON line each, with memory, and the checks between them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, Protocol

import jax

from enginepool.console.complaints import complain
from enginepool.reference.memory import in_use, snapshot


class Sink(Protocol):
    """Where phases go besides standard output."""

    def log(self, index: int, record: dict[str, Any]) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class Printer:
    """Prints phases to standard output as they happen, and failed checks to standard error.

    Attributes:
        sink: Gets every phase too, from the moment it is set.
        failed: Messages of the checks that failed.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._devices = devices
        self._started = time.perf_counter()
        self._count = 0
        self.sink: Sink | None = None
        self.failed: list[str] = []

    def phase(self, name: str, /, **fields: Any) -> int:
        """Print what the run has come to; returns the bytes in use on all devices.

        Drop what should no longer count before the call; garbage is collected here.
        """
        elapsed = time.perf_counter() - self._started
        memory = snapshot(self._devices)
        record = {"phase": name, **fields, "elapsed_s": elapsed, "memory": memory}
        print(json.dumps(record, ensure_ascii=False), flush=True)
        if self.sink is not None:
            self.sink.log(self._count, record)
        self._count += 1
        return in_use(memory)

    def determinism(self, same_output: bool, first: str, second: str) -> None:
        """The line that compares two outputs by their hashes; the only one that is not JSON."""
        print(
            f"[determinism] same_output={int(same_output)} "
            f"output1_sha256={first} output2_sha256={second}",
            flush=True,
        )

    def check(self, holds: bool, message: str) -> None:
        """Remember and say that something is not as it must be. The run goes on, for the phases
        that follow may tell why."""
        if not holds:
            self.failed.append(message)
            complain(f"check failed: {message}")

    def check_bytes(self, got: int, expected: int, what: str) -> None:
        """Exact on CPU. Elsewhere programs that are compiled meanwhile lie in device memory too,
        so a hundredth may differ."""
        slack = 0 if self._devices[0].platform == "cpu" else expected // 100
        self.check(
            abs(got - expected) <= slack,
            f"{what}: {got} bytes, expected {expected} ({got - expected:+d})",
        )
