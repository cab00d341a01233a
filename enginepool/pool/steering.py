"""The calls that abort, pause and continue engines, and those that report on them."""

from __future__ import annotations

from typing import Any, Literal

from enginepool.dispatch.condition import PauseMode
from enginepool.errors import InvalidRequest
from enginepool.frontend.cancellation import async_twin
from enginepool.pool.calls import CallGroup
from enginepool.runtime import pause, statistics
from enginepool.runtime.quiesce import pause_drained
from enginepool.values import flag, plain, shown

PoolPauseMode = PauseMode | Literal["drain"]
POOL_PAUSE_MODES = (*pause.PAUSE_MODES, "drain")


class SteeringCalls(CallGroup):
    """Mixin of `EnginePool`. Thread-safe. Every call opens the pool."""

    def abort_request(self, rid: str | None = None, *, abort_all: bool = False) -> int:
        """End the requests whose `meta_info["id"]` is exactly `rid`, or all requests.

        Each keeps the tokens that it has. Returns how many requests the call ends.
        """
        rid, abort_all = plain(rid), flag("abort_all", abort_all)
        if (rid is None) != abort_all:
            raise InvalidRequest("abort_request: give either rid or abort_all=True")
        if not (rid is None or isinstance(rid, str)):
            raise InvalidRequest(f"abort_request: rid={shown(rid)}: expected a string")
        dispatch = self.runtime.dispatch
        requests = dispatch.unfinished() if rid is None else dispatch.find(rid)
        dispatch.abort(requests, "abort_request", "cancelled")
        return len(requests)

    def pause_generation(self, mode: PoolPauseMode = "retract") -> None:
        """Stop all engines at their next step boundary. New requests wait.

        A paused engine uses no CPU.

        Args:
            mode: What happens to running requests. "in_place": they stay in the engine, with
                their KV cache. "retract": they go back to the queue with the tokens that they
                have, and their KV cache is freed. "abort": they end with the tokens that they
                have, and so do waiting requests. "drain": they finish first.
        """
        if not isinstance(mode, str) or mode not in POOL_PAUSE_MODES:
            expected = ", ".join(POOL_PAUSE_MODES)
            raise InvalidRequest(f"mode={shown(mode)}: expected one of {expected}")
        if mode == "drain":
            pause_drained(self.runtime)
        else:
            pause.pause(self.runtime, mode)

    def continue_generation(self) -> None:
        """Continue after `pause_generation`. Does nothing if the pool is not paused."""
        pause.resume(self.runtime)

    def flush_cache(self) -> None:
        """Empty every engine's prefix cache. Running requests compute their KV again."""
        pause.flush_cache(self.runtime)

    def stats(self) -> dict[str, Any]:
        """The state of each engine, the queue, requests and tokens so far, and memory by device."""
        return statistics.pool(self.runtime)

    def events(self) -> list[dict[str, Any]]:
        """The latest thousand events of engines, such as failures and recoveries, oldest first.

        Each has `event`, `time` (as `time.time`), `engine`, `devices` and fields of its own. The
        log has the same events.
        """
        return self.runtime.events.latest()

    def get_load(self) -> list[dict[str, Any]]:
        """Running requests and KV use of each engine. No engine stops for it."""
        return [statistics.load(worker) for worker in self.runtime.workers]

    async def async_abort_request(self, rid: str | None = None, *, abort_all: bool = False) -> int:
        """`abort_request` without blocking the event loop."""
        await self._async_runtime()
        return self.abort_request(rid, abort_all=abort_all)

    async_pause_generation = async_twin(pause_generation)
    async_continue_generation = async_twin(continue_generation)
    async_flush_cache = async_twin(flush_cache)
