"""Detects forks of a pool's process. They have the pool's objects, but none of its threads."""

from __future__ import annotations

import os
import threading

from enginepool.errors import ForkedProcess


class PoolProcess:
    """Knows in which process it was made."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.pid = os.getpid()

    @property
    def here(self) -> bool:
        return os.getpid() == self.pid

    def check(self) -> None:
        """Raise ForkedProcess in a fork. Call this before any wait: a lock that was held at the
        fork is never released."""
        if not self.here:
            raise ForkedProcess(
                f"pool {self._name!r} was opened in process {self.pid}. This is process "
                f"{os.getpid()}, a fork of it, which has none of its engines. Make and open a pool "
                'in the child, or start the child with multiprocessing\'s "spawn"'
            )


_python_ends = threading.Event()


def record_python_ends() -> None:
    """Record that Python ends. An exit hook calls it."""
    _python_ends.set()


def rest_if_python_ends() -> None:
    """Block a daemon thread for good, if Python ends.

    Python is about to stop that thread silently. If its call raised first, a traceback would be
    printed.
    """
    if _python_ends.is_set() and threading.current_thread().daemon:
        threading.Event().wait()
