"""The load of the last minutes, for the page."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from enginepool.serve.record import ExchangeRecord

if TYPE_CHECKING:
    from enginepool.runtime.runtime import Runtime

INTERVAL_SECONDS = 2.0
KEPT = 150  # five minutes
_NO_FAULT = ("ok", "disconnected")


@dataclass
class _Interval:
    """Requests that ended since the last sample."""

    first_tokens: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add(self, record: ExchangeRecord) -> None:
        self.requests += 1
        self.failed += record.outcome not in _NO_FAULT
        for output in record.outputs:
            self.latencies.append(output.seconds)
            if output.first_token_seconds is not None:
                self.first_tokens.append(output.first_token_seconds)
            if output.cached_tokens is not None:
                self.prompt_tokens += output.prompt_tokens
                self.cached_tokens += output.cached_tokens

    def figures(self) -> dict[str, float | None]:
        """The figures of a sample; None where there was no request."""
        return {
            "first_token_p95": _p95(self.first_tokens),
            "latency_p95": _p95(self.latencies),
            "failed_share": _share(self.failed, self.requests),
            "prefix_hit_share": _share(self.cached_tokens, self.prompt_tokens),
        }


class History:
    """Takes a sample every two seconds. A sample is a few sums, so an idle server stays idle."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._samples: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._last = self._counted()
        self._interval = _Interval()

    async def keep(self) -> None:
        """Take samples until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            self.take()

    def ended(self, record: ExchangeRecord) -> None:
        """Count a request to a route that generates."""
        self._interval.add(record)

    def take(self) -> None:
        now = self._counted()
        at, requests, tokens = now
        seconds = max(at - self._last[0], 1e-3)
        self._samples.append(
            {
                "time": time.time(),
                "requests_per_sec": (requests - self._last[1]) / seconds,
                "tokens_per_sec": (tokens - self._last[2]) / seconds,
                "running": sum(w.channel.load() for w in self._runtime.workers),
                "waiting": self._runtime.dispatch.waiting,
                **self._interval.figures(),
            }
        )
        self._last, self._interval = now, _Interval()

    def samples(self) -> list[dict[str, Any]]:
        return list(self._samples)

    def _counted(self) -> tuple[float, int, int]:
        counts = self._runtime.dispatch.counts
        return time.monotonic(), counts.finished + counts.aborted, counts.completion_tokens


def _p95(seconds: list[float]) -> float | None:
    if len(seconds) < 2:
        return seconds[0] if seconds else None
    return quantiles(seconds, n=20, method="inclusive")[-1]


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
