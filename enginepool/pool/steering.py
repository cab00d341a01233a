"""What steers the engines of a pool while they run, and says what they do."""

from __future__ import annotations

from typing import Any, Literal

import anyio.to_thread

from enginepool.dispatch.condition import PauseMode
from enginepool.errors import InvalidRequest
from enginepool.pool.calls import CallGroup
from enginepool.runtime import pause, statistics
from enginepool.runtime.quiesce import pause_drained
from enginepool.values import flag, plain, shown

PoolPauseMode = PauseMode | Literal["drain"]
POOL_PAUSE_MODES = (*pause.PAUSE_MODES, "drain")


class SteeringCalls(CallGroup):
    """Mixin of `EnginePool`. Thread-safe; all open the pool."""

    def abort_request(self, rid: str | None = None, *, abort_all: bool = False) -> int:
        """End the requests whose `meta_info["id"]` is exactly `rid`, or all; they keep what they
        have. Returns how many were meant."""
        rid, abort_all = plain(rid), flag("abort_all", abort_all)
        if (rid is None) != abort_all:
            raise InvalidRequest("abort_request: give either rid or abort_all=True")
        if not (rid is None or isinstance(rid, str)):
            raise InvalidRequest(f"abort_request: rid={shown(rid)}: expected a string")
        dispatch = self._runtime().dispatch
        requests = dispatch.unfinished() if rid is None else dispatch.find(rid)
        dispatch.abort(requests, "abort_request", "cancelled")
        return len(requests)

    def pause_generation(self, mode: PoolPauseMode = "retract") -> None:
        """Stop all engines at their next step boundary; new requests wait. Idle is free.

        Args:
            mode: "in_place" keeps running requests where they are. "retract" puts them back
                into the queue with the tokens that they have, and frees their KV cache. "abort"
                ends them, and what waits, with what they have. "drain" lets them finish first.
        """
        if not isinstance(mode, str) or mode not in POOL_PAUSE_MODES:
            expected = ", ".join(POOL_PAUSE_MODES)
            raise InvalidRequest(f"mode={shown(mode)}: expected one of {expected}")
        if mode == "drain":
            pause_drained(self._runtime())
        else:
            pause.pause(self._runtime(), mode)

    def continue_generation(self) -> None:
        """Go on after `pause_generation`. Does nothing if the pool is not paused."""
        pause.resume(self._runtime())

    def flush_cache(self) -> None:
        """Empty every engine's prefix cache. Running requests go on; their KV is computed anew."""
        pause.flush_cache(self._runtime())

    def stats(self) -> dict[str, Any]:
        """Engines with their states, queue, prompts and tokens so far, memory by device."""
        return statistics.pool(self._runtime())

    def events(self) -> list[dict[str, Any]]:
        """The latest thousand failures, recoveries and the like, oldest first: `event`, `time`
        (as `time.time`), `engine`, `devices` and what belongs to each. The log has them too."""
        return self._runtime().events.latest()

    def get_load(self) -> list[dict[str, Any]]:
        """Running and waiting requests and KV use of each engine, without stopping any."""
        return [statistics.load(worker) for worker in self._runtime().workers]

    async def async_abort_request(self, rid: str | None = None, *, abort_all: bool = False) -> int:
        """`abort_request`; opens the pool without blocking the event loop."""
        await self._async_runtime()
        return self.abort_request(rid, abort_all=abort_all)

    async def async_pause_generation(self, mode: PoolPauseMode = "retract") -> None:
        """`pause_generation` without blocking the event loop."""
        await anyio.to_thread.run_sync(self.pause_generation, mode)

    async def async_continue_generation(self) -> None:
        """`continue_generation` without blocking the event loop."""
        await anyio.to_thread.run_sync(self.continue_generation)

    async def async_flush_cache(self) -> None:
        """`flush_cache` without blocking the event loop."""
        await anyio.to_thread.run_sync(self.flush_cache)
