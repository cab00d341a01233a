"""The lock for changes of a pool, such as pauses and swaps: one at a time, none inside another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from enginepool.errors import InvalidRequest, PoolClosed

# The locks, of all pools, that the running code holds. This is a context variable, because a call
# may go to an event loop or, with anyio, to another thread.
_inside: ContextVar[tuple[_Holder, ...]] = ContextVar("_inside", default=())


class SteeringLock:
    """Held by the one call that changes a pool."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: _Holder | None = None
        self._closed: str | None = None

    @contextmanager
    def hold(self, call: str) -> Iterator[None]:
        """Wait for the lock and hold it inside the `with`.

        Args:
            call: The call that takes the lock, as a user writes it.

        Raises:
            InvalidRequest: The caller already holds this lock, so it would wait for itself. For
                example, it runs inside the iterator that `update_weights` reads.
            PoolClosed: The pool is closed, or was closed meanwhile.
        """
        if (outer := self.inside()) is not None:
            raise InvalidRequest(
                f"{call} inside {outer} would wait for itself: call it before or after {outer}, "
                "not from the iterator that it reads"
            )
        holder = _Holder(call)
        try:  # Control-C may come at any line
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._holder is None)
                if self._closed is not None:
                    raise PoolClosed(self._closed)
                self._holder = holder
            token = _inside.set((*_inside.get(), holder))
            try:
                yield
            finally:
                _inside.reset(token)
        finally:
            with self._changed:
                if self._holder is holder:
                    self._holder = None
                    self._changed.notify_all()

    def close(self, why: str) -> None:
        """Let nobody hold the lock any more. Whoever waits for it gets `PoolClosed`."""
        with self._changed:
            self._closed = why
            self._changed.notify_all()

    def inside(self) -> str | None:
        """The call that holds this lock, if the running code is inside that call. Else None."""
        holder = self._holder
        inside = holder is not None and any(one is holder for one in _inside.get())
        return holder.call if holder is not None and inside else None


class _Holder:
    def __init__(self, call: str) -> None:
        self.call = call
