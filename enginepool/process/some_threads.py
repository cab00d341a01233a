"""Something of the process's that is to be otherwise on some of its threads, for a while."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SomeThreads:
    """The threads that are inside. Thread-safe; a thread may be inside several times.

    Args:
        install: Called as the first of them enters; returns what is called as the last one leaves.
            What it installs asks `here` whether it is meant.
    """

    def __init__(self, install: Callable[[], Callable[[], None]]) -> None:
        self._install = install
        self._restore: Callable[[], None] | None = None
        self._inside: Counter[int] = Counter()
        self._lock = threading.Lock()

    @property
    def here(self) -> bool:
        """Whether this thread is inside."""
        return self._inside[threading.get_ident()] > 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Have this thread inside."""
        thread = threading.get_ident()
        with self._lock:
            if self._restore is None:
                self._restore = self._install()
            self._inside[thread] += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside[thread] -= 1
                if not self._inside[thread]:
                    del self._inside[thread]
                if not self._inside:
                    self._restore()
                    self._restore = None
