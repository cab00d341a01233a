"""The progress of a start, and the seconds of its stages.

JAX's monitoring events tell how long a thread traced, lowered and compiled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from enginepool.process.thread_override import ThreadOverride

_KINDS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
_thread = threading.local()


class StartStages:
    """The stages of a start, one after the other. One thread begins stages. Threads inside
    `listening` add to the counts, and any thread reads.

    Attributes:
        now: The stage that runs. None between stages.
        seconds: By stage. A stage inside another does not count for the outer one.
        jax_seconds: Seconds in which threads inside `listening` traced, lowered, and compiled or
            loaded programs.
        programs: How many programs they compiled or loaded.
        bucket, buckets: The number of the bucket that a warm-up compiles for, and how many there
            are.
    """

    def __init__(self, begun: Callable[[str], None] = lambda _: None) -> None:
        """
        Args:
            begun: Called with each stage that begins.
        """
        self._begun = begun
        self._lock = threading.Lock()
        self._since = 0.0
        self.clear()

    def clear(self) -> None:
        """Begin another start."""
        self.now: str | None = None
        self.seconds: dict[str, float] = {}
        self.jax_seconds = dict.fromkeys(_KINDS.values(), 0.0)
        self.programs = self.bucket = self.buckets = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        outer = self.now
        self._change(name)
        self._begun(name)
        try:
            yield
        finally:
            self._change(outer)

    def _change(self, stage: str | None) -> None:
        now = time.perf_counter()
        if self.now is not None:
            self.seconds[self.now] = self.seconds.get(self.now, 0.0) + now - self._since
        self.now, self._since = stage, now

    def next_bucket(self) -> None:
        """Record that a warm-up begins with its next bucket. Any thread."""
        with self._lock:
            self.bucket += 1

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Count what this thread traces, lowers and compiles inside the block."""
        outer = getattr(_thread, "count", None)
        _thread.count = self._counter()
        try:
            with _listener.on_this_thread():
                yield
        finally:
            _thread.count = outer

    def _counter(self) -> Callable[[str, float], None]:
        spans: list[tuple[float, float]] = []  # begin and length of each, the latest last

        def count(kind: str, seconds: float) -> None:
            began, inside = time.perf_counter() - seconds, 0.0
            while spans and spans[-1][0] >= began:  # a jitted function inside this one
                inside += spans.pop()[1]
            spans.append((began, seconds))
            with self._lock:
                self.jax_seconds[kind] += seconds - inside
                self.programs += kind == "compile"

        return count

    def report(self) -> dict[str, Any]:
        """Plain figures, for `stats()` and the log."""
        return {
            "seconds": dict(self.seconds),
            "jax_seconds": dict(self.jax_seconds),
            "programs": self.programs,
        }


def _listen() -> Callable[[], None]:
    def heard(event: str, duration_secs: float, **_: Any) -> None:
        count = getattr(_thread, "count", None)
        if count is not None and (kind := _KINDS.get(event)) is not None:
            count(kind, duration_secs)

    jax.monitoring.register_event_duration_secs_listener(heard)
    return lambda: jax.monitoring.unregister_event_duration_listener(heard)


_listener = ThreadOverride(_listen)
