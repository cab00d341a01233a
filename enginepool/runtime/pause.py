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

        def stop(worker: EngineWorker) -> list[Request]:
            worker.pause("paused")
            return [] if mode == "in_place" else worker.channel.retract()

        taken = [request for group in runtime.on_engines(stop, engine_index) for request in group]
        if mode == "abort":
            if engine_index is None:
                taken += dispatch.take_waiting()
            reason = aborted("pause_generation(mode='abort')", "cancelled")
            for request in taken:
                request.call.finish(request, reason)
        else:
            dispatch.resume(taken)


def resume(runtime: Runtime, engine_index: int | None = None) -> None:
    """Let paused engines go on."""

    def go_on(worker: EngineWorker) -> None:
        worker.go_on("paused")

    with runtime.steering.hold("continue_generation()"):
        if engine_index is None:
            runtime.desired.pause_reasons.discard("paused")
        runtime.on_engines(go_on, engine_index)


def flush_cache(runtime: Runtime, engine_index: int | None = None) -> None:
    """Empty the prefix cache of every engine, or of one.

    Upstream refuses this while a request runs. Here running requests are retracted with the tokens
    that they have, and resume afterwards.
    """
    with runtime.steering.hold("flush_cache()"):
        taken = runtime.on_engines(lambda worker: worker.channel.retract(), engine_index)
        runtime.dispatch.resume(request for group in taken for request in group)
