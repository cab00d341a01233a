"""What happened to a pool's engines: one structlog event each, and the latest thousand to read."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from enginepool.logs import logger

if TYPE_CHECKING:
    from enginepool.engine.worker import EngineWorker

LIMIT = 1000


class Events:
    """Thread-safe."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._latest: deque[dict[str, Any]] = deque(maxlen=LIMIT)

    def add(self, event: str, worker: EngineWorker, *, level: str = "info", **fields: Any) -> None:
        about = {
            "engine": worker.index,
            "devices": [device.id for device in worker.devices],
            **fields,
        }
        self._latest.append({"event": event, "time": time.time(), **about})
        getattr(logger(), level)(f"enginepool.{event}", pool=self._pool, **about)

    def latest(self) -> list[dict[str, Any]]:
        return list(self._latest)
