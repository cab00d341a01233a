"""Whether the one who asked is still there, for work in a thread that may be in vain."""

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
    """Run what starts nothing in a worker thread. A task that is cancelled does not wait for it,
    and the thread can see it by `asker_left`."""
    left = threading.Event()
    token = _left.set(left)
    try:
        return await run_sync(work, *args, limiter=limiter, abandon_on_cancel=True)
    except BaseException:
        left.set()
        raise
    finally:
        _left.reset(token)


def asker_left() -> bool:
    """Whether the task that this thread works for has been cancelled."""
    left = _left.get()
    return left is not None and left.is_set()
