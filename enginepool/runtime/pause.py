"""Pause, continue and flush, at the engines' step boundaries; never in the middle of a swap."""

from __future__ import annotations

from typing import Any, get_args

from enginepool.engine.channel import Channel
from enginepool.engine.states import PauseMode
from enginepool.errors import InvalidRequest
from enginepool.requests.request import aborted
from enginepool.runtime.runtime import Runtime
from enginepool.values import shown

PAUSE_MODES = get_args(PauseMode)


def pause(runtime: Runtime, mode: str, engine: int | None = None) -> None:
    """Stop engines (all, or one) at their next step boundary."""
    if not isinstance(mode, str) or mode not in PAUSE_MODES:
        raise InvalidRequest(f"mode={shown(mode)}: expected one of {', '.join(PAUSE_MODES)}")
    with runtime.steering.turn("pause_generation()"):
        if engine is None:
            runtime.queue.paused = True

        def stop(channel: Channel) -> list[Any]:
            channel.stops.add("paused")
            return [] if mode == "in_place" else channel.take_back()

        taken = [request for group in runtime.on_engines(stop, engine) for request in group]
        if mode == "abort":
            if engine is None:
                taken += runtime.queue.drain() + runtime.admission.drain()
            reason = aborted("pause_generation(mode='abort')", "cancelled")
            for request in taken:
                request.call.finish(request, reason)
        else:
            runtime.resume(taken)


def resume(runtime: Runtime, engine: int | None = None) -> None:
    """Let paused engines go on."""

    def go_on(channel: Channel) -> None:
        channel.stops.discard("paused")

    with runtime.steering.turn("continue_generation()"):
        runtime.on_engines(go_on, engine)
        if engine is None:
            runtime.queue.paused = False
    runtime.queue.wake_all()


def flush_cache(runtime: Runtime, engine: int | None = None) -> None:
    """Empty the prefix cache of every engine, or of one.

    Upstream refuses while anything runs; here what runs is taken back with the tokens that it
    has and goes on afterwards.
    """
    with runtime.steering.turn("flush_cache()"):
        taken = runtime.on_engines(Channel.take_back, engine)
        runtime.resume(request for group in taken for request in group)
