"""The base class of `EnginePool`'s mixins, and functions that run a call to its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import anyio.to_thread

from enginepool.dispatch.request import Call
from enginepool.dispatch.wait import async_wait_all, submitted, wait_all
from enginepool.frontend.output_processor import call_results
from enginepool.runtime.runtime import Runtime


class CallGroup(ABC):
    """A mixin of `EnginePool`."""

    @property
    @abstractmethod
    def runtime(self) -> Runtime:
        """The parts of the open pool: workers, dispatch, input. Opens the pool.

        For tests and tools that look inside. Its contents may change at any time.

        Raises:
            PoolClosed, EngineStartFailed: As `EnginePool.open`.
        """

    @abstractmethod
    async def _async_runtime(self) -> Runtime:
        """`runtime` without blocking the event loop."""


def run_call(
    runtime: Runtime,
    call: Call,
    timeout: float | None,
    raise_on_error: bool,
    tick: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:
    """Submit a call and wait for its results, in order; see `wait_all` and `call_results`."""
    with submitted(runtime.dispatch, call):
        wait_all(runtime.dispatch, call, timeout, tick)
    return call_results(call, runtime.input_processor.tokenizer, raise_on_error)


async def async_run_call(
    runtime: Runtime, call: Call, timeout: float | None, raise_on_error: bool
) -> list[dict[str, Any]]:
    """`run_call` for a task."""
    with submitted(runtime.dispatch, call):
        await async_wait_all(runtime.dispatch, call, timeout)
    return await anyio.to_thread.run_sync(
        call_results, call, runtime.input_processor.tokenizer, raise_on_error
    )


def single(call: Call, results: list[dict[str, Any]]) -> dict[str, Any] | list[dict[str, Any]]:
    """The result of a lone prompt by itself, as upstream returns it; otherwise the list."""
    return results[0] if call.lone and len(results) == 1 else results
