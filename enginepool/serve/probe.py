"""Checks that engines generate."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from enginepool.dispatch.condition import EngineState
from enginepool.dispatch.wait import async_wait_all, submitted
from enginepool.errors import EnginePoolError, QueueFull
from enginepool.serve.error_replies import Refused

if TYPE_CHECKING:
    from enginepool.engine.worker import EngineWorker
    from enginepool.runtime.runtime import Runtime

SECONDS = 20.0  # as upstream waits
_FULL_SECONDS = 1.0


async def check_engines(runtime: Runtime, only: int | None = None) -> None:
    """Have every engine, or one, generate a token.

    Raises:
        Refused: 503, with the engines that do not.
    """
    workers = runtime.workers if only is None else [runtime.workers[only]]
    said = await asyncio.gather(*(_trouble(runtime, worker) for worker in workers))
    if troubles := [trouble for trouble in said if trouble is not None]:
        raise Refused(503, "; ".join(troubles), retry_after=1)


async def _trouble(runtime: Runtime, worker: EngineWorker) -> str | None:
    state = worker.condition.state
    if state not in (EngineState.SERVING, EngineState.DRAINING):
        return f"engine {worker.index} is {state.value}"
    steps = worker.channel.steps
    why = await _failure(runtime, worker.index)
    # A full engine has no room for the request. It works if it takes steps.
    if why is None or worker.channel.steps > steps:
        return None
    return f"engine {worker.index}: {why}"


async def _failure(runtime: Runtime, index: int) -> str | None:
    """Ask this engine for one token; why it failed, or None."""
    call = runtime.input_processor.make_call(
        None, {"max_new_tokens": 1, "temperature": 0}, {"input_ids": [0]}, pinned_to=index
    )
    try:
        with submitted(runtime.dispatch, call):
            await async_wait_all(runtime.dispatch, call, SECONDS)
    except QueueFull as error:
        await asyncio.sleep(_FULL_SECONDS)
        return str(error)
    except EnginePoolError as error:  # the engine or the pool has ended meanwhile
        return str(error)
    (request,) = call.requests
    reason = request.finish_reason or {}
    return str(call.failure or reason["message"]) if reason.get("type") == "abort" else None
