"""A limit on engines that run Python at once: the host's part of a step, and of a compilation.

The GIL lets one engine's Python run at a time anyway. But a step lets go of it some twenty times,
at every transfer and launch, and whenever several engines want it each of these costs a switch
of threads and cold caches. Here an engine goes on until it waits for its device.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Iterator

import patches

# Seconds after which an engine that others wait for has lost its slot: its step compiles, or hangs.
STEP_PATIENCE = 0.05


class Limiter:
    """So many threads at a time. Thread-safe; a slot belongs to the thread that acquired it.

    Waiting threads get theirs in the order in which they came. Nobody waits for a thread that
    keeps its slot for longer than `patience`, in seconds; it goes on, without one.
    """

    def __init__(self, at_once: int, patience: float) -> None:
        self.patience = patience
        self._free = threading.Semaphore(at_once)
        self._lock = threading.Lock()
        self._since: dict[int, float] = {}  # by thread: when it got its slot, oldest first

    def acquire(self) -> None:
        """Wait for a slot. The thread must not have one."""
        while not self._free.acquire(timeout=self.patience):
            self._end_overdue()
        with self._lock:
            self._since[threading.get_ident()] = time.monotonic()

    def release(self) -> None:
        """Give the thread's slot back, if it still has one."""
        with self._lock:
            had = self._since.pop(threading.get_ident(), None)
        if had is not None:
            self._free.release()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """For work as a whole; the thread must not have a slot."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """For a wait: others may have the slot until the block ends. It is not acquired again after
        an error, or for a thread that had none."""
        had = threading.get_ident() in self._since
        self.release()
        yield
        if had:
            self.acquire()

    def _end_overdue(self) -> None:
        with self._lock:
            thread, since = next(iter(self._since.items()), (0, time.monotonic()))
            overdue = time.monotonic() - since > self.patience
            if overdue:
                del self._since[thread]
        if overdue:
            self._free.release()


@functools.cache
def process_limiter() -> Limiter:
    """For steps of all pools of the process, which share one GIL.

    Two at a time, so that one can be in JAX's native code while the other has the GIL.
    """
    if not patches.optimising():
        return Limiter(sys.maxsize, STEP_PATIENCE)
    return Limiter(2, STEP_PATIENCE)
