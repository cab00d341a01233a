"""How the calls of a pool on many hosts get to them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from enginepool.ray.fleet import Fleet


class Opening(ABC):
    """What every group of `RayEnginePool`'s calls builds on."""

    _fleet: Fleet | None

    @abstractmethod
    def _opened(self) -> Fleet:
        """The hosts; starts them if they are not.

        Raises:
            PoolClosed, EnginePoolError: As `RayEnginePool.open`.
        """
