"""A lock that threads get in the order in which they asked for it."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """A lock in order of arrival.

    With a `threading.Lock`, a thread that releases the lock and takes it again overtakes threads
    that wait. A thread that does so in a loop keeps all others out.

    Attributes:
        waiting: One lock for each thread that waits, in order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self.waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            turn = threading.Lock()
            turn.acquire()
            self.waiting.append(turn)
        try:
            turn.acquire()
        except BaseException:  # KeyboardInterrupt: this thread may have got the lock already
            with self._lock:
                mine = turn not in self.waiting
                if not mine:
                    self.waiting.remove(turn)
            if mine:
                self._next()
            raise

    def __exit__(self, *exc: object) -> None:
        self._next()

    def _next(self) -> None:
        with self._lock:
            if self.waiting:
                self.waiting.popleft().release()
            else:
                self._taken = False
