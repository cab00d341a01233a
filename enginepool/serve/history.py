"""The load of the last minutes, for the page."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginepool.runtime.runtime import Runtime

INTERVAL_SECONDS = 2.0
KEPT = 150  # five minutes


class History:
    """A sample every two seconds: a few sums, so an idle server stays idle."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._samples: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._last = self._counted()

    async def keep(self) -> None:
        """Take samples until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            self.take()

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
            }
        )
        self._last = now

    def samples(self) -> list[dict[str, Any]]:
        return list(self._samples)

    def _counted(self) -> tuple[float, int, int]:
        counts = self._runtime.dispatch.counts
        return time.monotonic(), counts.finished + counts.aborted, counts.completion_tokens
