"""How the calls of a pool get to what is open behind it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from enginepool.runtime.runtime import Runtime


class Opening(ABC):
    """What every group of `EnginePool`'s calls builds on."""

    @abstractmethod
    def _runtime(self) -> Runtime:
        """The open pool; opens it if it is not.

        Raises:
            PoolClosed, EngineStartFailed: As `EnginePool.open`.
        """

    @abstractmethod
    async def _async_runtime(self) -> Runtime:
        """`_runtime` without blocking the event loop."""
