"""Runs work in a thread for a task. The thread can find out if the task was cancelled."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, Concatenate

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

_left: ContextVar[threading.Event | None] = ContextVar("enginepool_left", default=None)


async def in_thread[T](
    work: Callable[..., T], *args: Any, limiter: CapacityLimiter | None = None
) -> T:
    """Run `work`, which must start nothing in an engine, in a worker thread.

    A cancelled task does not wait for the thread. The thread learns of it from `caller_left`.
    """
    left = threading.Event()
    token = _left.set(left)
    try:
        return await run_sync(work, *args, limiter=limiter, abandon_on_cancel=True)
    except BaseException:
        left.set()
        raise
    finally:
        _left.reset(token)


def caller_left() -> bool:
    """Whether the task that this thread works for was cancelled."""
    left = _left.get()
    return left is not None and left.is_set()


def async_twin[C, **P, R](
    method: Callable[Concatenate[C, P], R],
) -> Callable[Concatenate[C, P], Coroutine[Any, Any, R]]:
    """Make an async method that runs this method in a thread. Cancelling does not stop it."""

    @functools.wraps(method)
    async def twin(calls: C, *args: P.args, **kwargs: P.kwargs) -> R:
        return await run_sync(functools.partial(method, calls, *args, **kwargs))

    twin.__doc__ = (
        f"`{method.__name__}` without blocking the event loop. Cancelling does not stop it."
    )
    return twin
