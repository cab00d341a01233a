"""Pauses, swaps and the like happen one at a time, and none waits for itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from enginepool.errors import InvalidRequest

# The turns that the running code is inside of, of any pools. A context, not a thread: it is kept
# where a call goes over an event loop or, with anyio, to another thread.
_inside: ContextVar[tuple[_Turn, ...]] = ContextVar("_inside", default=())


class SteeringLock:
    """Who changes a pool has a turn, during which nobody else does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: _Turn | None = None

    @contextmanager
    def turn(self, call: str) -> Iterator[None]:
        """Wait for a turn and have it inside the `with`.

        Args:
            call: What takes the turn, as a user calls it.

        Raises:
            InvalidRequest: From inside the turn that it would wait for, as an iterator is that
                `update_weights` reads.
        """
        if (outer := self.inside()) is not None:
            raise InvalidRequest(
                f"{call} inside {outer} would wait for itself: call it before or after {outer}, "
                "not from the iterator that it reads"
            )
        with self._lock:
            self._current = turn = _Turn(call)
            token = _inside.set((*_inside.get(), turn))
            try:
                yield
            finally:
                _inside.reset(token)
                self._current = None

    def inside(self) -> str | None:
        """The call whose turn the running code is inside of, if it is."""
        current = self._current
        inside = current is not None and any(turn is current for turn in _inside.get())
        return current.call if current is not None and inside else None


class _Turn:
    def __init__(self, call: str) -> None:
        self.call = call
