"""The share of time in which a device computes, by JAX's profiler."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

# The lanes of a trace that show a device's work: a GPU's streams, a TPU's programs.
_LANES = ("Stream", "XLA Modules")


def busy_share(folder: Path, seconds: float, work: Callable[[], Any]) -> dict[str, Any]:
    """Trace this many seconds in the middle of `work`. On CPU there are no figures, because its
    trace has no device. `work` runs on this thread, because upstream's Engine needs its loop."""
    started = time.perf_counter()
    work()  # to learn how long it takes
    pause = max(0.0, (time.perf_counter() - started - seconds) / 2)

    def trace() -> None:
        time.sleep(pause)
        jax.profiler.start_trace(str(folder), create_perfetto_trace=True)
        time.sleep(seconds)
        jax.profiler.stop_trace()

    with ThreadPoolExecutor(1) as thread:
        traced = thread.submit(trace)
        work()
        traced.result()
    (file, *_) = sorted(folder.glob("**/perfetto_trace.json.gz"))
    with gzip.open(file) as opened:
        return shares(json.load(opened))


def shares(trace: Any) -> dict[str, Any]:
    """The share of the time between the first and the last event of a trace in which an event
    runs."""
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    lanes = {
        (event["pid"], event.get("tid")): event["args"].get("name", "")
        for event in events
        if event.get("ph") == "M" and event.get("name") in ("process_name", "thread_name")
    }
    spans = sorted(
        (event["ts"], event["ts"] + event.get("dur", 0))
        for event in events
        if event.get("ph") == "X"
        and "/device:" in _process(lanes, event["pid"])
        and lanes.get((event["pid"], event["tid"]), "").startswith(_LANES)
    )
    return _busy(spans) if spans else {}


def _process(lanes: dict[tuple[int, Any], str], pid: int) -> str:
    names = (name for (one, _), name in lanes.items() if one == pid)
    return next((name for name in names if name.startswith("/device:")), "")


def _busy(spans: Iterable[tuple[float, float]]) -> dict[str, Any]:
    (begin, end), *others = spans
    busy = end - begin
    for start, stop in others:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return {"percent": 100 * busy / (end - begin), "window_ms": (end - begin) / 1000}
