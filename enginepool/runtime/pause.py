"""Pauses, continues and flushes engines at their step boundaries, never in the middle of a swap."""

from __future__ import annotations

from typing import get_args

from enginepool.dispatch.condition import PauseMode
from enginepool.dispatch.request import Request, aborted
from enginepool.engine.worker import EngineWorker
from enginepool.errors import InvalidRequest
from enginepool.runtime.runtime import Runtime
from enginepool.values import shown

PAUSE_MODES = get_args(PauseMode)


def pause(runtime: Runtime, mode: str, engine_index: int | None = None) -> None:
    """Stop engines (all, or one) at their next step boundary."""
    if not isinstance(mode, str) or mode not in PAUSE_MODES:
        raise InvalidRequest(f"mode={shown(mode)}: expected one of {', '.join(PAUSE_MODES)}")
    dispatch = runtime.dispatch
    with runtime.steering.hold("pause_generation()"):
        if engine_index is None:
            runtime.desired.pause_reasons.add("paused")
        else:
            runtime.desired.paused_engines.add(engine_index)

        def end(requests: list[Request]) -> None:
            reason = aborted("pause_generation(mode='abort')", "cancelled")
            for request in requests:
                request.call.finish(request, reason)

        give_back = end if mode == "abort" else dispatch.resume

        def stop(worker: EngineWorker) -> None:
            worker.pause("paused")
            if mode != "in_place":
                # Here, on the engine's thread, because Control-C may end the wait for it.
                give_back(worker.channel.retract())

        runtime.on_engines(stop, engine_index)
        if mode == "abort":
            dispatch.queue.wait_for_arrival()  # an engine may have failed meanwhile
            end(dispatch.take_waiting(engine_index))


def resume(runtime: Runtime, engine_index: int | None = None) -> None:
    """Let paused engines go on (all, or one)."""

    def go_on(worker: EngineWorker) -> None:
        worker.go_on("paused")

    desired = runtime.desired
    with runtime.steering.hold("continue_generation()"):
        if "paused" in desired.pause_reasons:  # from here on, each engine by itself
            desired.pause_reasons.discard("paused")
            desired.paused_engines.update(worker.index for worker in runtime.workers)
        if engine_index is None:
            desired.paused_engines.clear()
        else:
            desired.paused_engines.discard(engine_index)
        runtime.on_engines(go_on, engine_index)


def flush_cache(runtime: Runtime, engine_index: int | None = None) -> None:
    """Empty the prefix cache of every engine, or of one.

    Upstream refuses this while a request runs. Here running requests are retracted with the tokens
    that they have, and resume afterwards.
    """
    dispatch = runtime.dispatch
    with runtime.steering.hold("flush_cache()"):
        # On the engine's thread, as in `pause`.
        runtime.on_engines(lambda worker: dispatch.resume(worker.channel.retract()), engine_index)
