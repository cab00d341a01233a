"""Limits how many engines run Python at once: the host's part of a step, or of a compilation.

The GIL lets only one engine run Python at a time. But a step releases the GIL about twenty times,
at every transfer and launch. If several engines want it, each release costs a switch of threads
and cold caches. With the limiter an engine that has a slot runs until it waits for its device,
which may be several steps.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Iterator

import patches

# Seconds after which an engine loses its slot, if others wait: its step compiles or hangs.
STEP_PATIENCE = 0.05


class Limiter:
    """A limited number of slots. Thread-safe; a slot belongs to the thread that acquired it.

    Threads that wait for a slot get one in no fixed order. A thread that keeps its slot for longer
    than `patience` seconds loses it to a waiting thread, and goes on without one.
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

    def hold(self) -> None:
        """Wait for a slot, unless the thread has one."""
        if threading.get_ident() not in self._since:
            self.acquire()

    def release(self) -> None:
        """Give the thread's slot back, if it still has one."""
        with self._lock:
            had = self._since.pop(threading.get_ident(), None)
        if had is not None:
            self._free.release()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold a slot inside the block. The thread must not have one."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Give the slot to others inside the block, which waits for something. Afterwards acquire
        one again, unless the block raised or the thread had none."""
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
    """The limiter of all pools of the process, which share one GIL.

    It has two slots, so that one engine can be in JAX's native code while another has the GIL.
    """
    if not patches.optimising():
        return Limiter(sys.maxsize, STEP_PATIENCE)
    return Limiter(2, STEP_PATIENCE)
