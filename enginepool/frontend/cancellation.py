"""Work in a thread that can see that its caller was cancelled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

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
