"""The process that a pool lives in: forks of it have the pool's objects and none of its threads."""

from __future__ import annotations

import os
import threading

from enginepool.errors import ForkedProcess


class PoolProcess:
    """The process in which it was made."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.pid = os.getpid()

    @property
    def here(self) -> bool:
        return os.getpid() == self.pid

    def check(self) -> None:
        """Before anything that could wait: whoever held a lock at the fork never gives it back."""
        if not self.here:
            raise ForkedProcess(
                f"pool {self._name!r} was opened in process {self.pid}, and this is process "
                f"{os.getpid()}, forked from it: its engines are not here. Make and open a pool "
                'in the child, or start the child with multiprocessing\'s "spawn"'
            )


_python_ends = threading.Event()


def python_ends() -> None:
    """Say so, from a hook that runs at exit."""
    _python_ends.set()


def rest_if_python_ends() -> None:
    """Never return to a daemon thread whose call ends because Python does.

    Python is about to stop that thread without a word; with an error it would print a traceback.
    """
    if _python_ends.is_set() and threading.current_thread().daemon:
        threading.Event().wait()
