"""Events of a pool's engines. Each goes to the log, and the latest thousand are kept."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax

from enginepool.logs import logger

LIMIT = 1000


class EngineEvents:
    """The latest events of a pool's engines. Thread-safe."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._latest: deque[dict[str, Any]] = deque(maxlen=LIMIT)

    def add(
        self,
        event: str,
        engine_index: int,
        devices: Sequence[jax.Device],
        *,
        level: str = "info",
        **fields: Any,
    ) -> None:
        about = {
            "engine": engine_index,
            "devices": [device.id for device in devices],
            **fields,
        }
        self._latest.append({"event": event, "time": time.time(), **about})
        getattr(logger(), level)(f"enginepool.{event}", pool=self._pool, **about)

    def latest(self) -> list[dict[str, Any]]:
        return list(self._latest)
