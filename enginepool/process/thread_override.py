"""A thread-scoped override: replaces something process-wide for some threads only."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ThreadOverride:
    """An override that is in effect for the threads inside `on_this_thread`. Thread-safe.

    Args:
        install: Called when the first thread enters. It puts the override in place, and returns a
            function that removes it when the last thread leaves. The override asks `active` on
            every use.
    """

    def __init__(self, install: Callable[[], Callable[[], None]]) -> None:
        self._install = install
        self._restore: Callable[[], None] | None = None
        self._inside: Counter[int] = Counter()
        self._lock = threading.Lock()

    @property
    def active(self) -> bool:
        """Whether the override is in effect for the calling thread."""
        return self._inside[threading.get_ident()] > 0

    @contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """Put the override in effect for the calling thread. May be nested."""
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
