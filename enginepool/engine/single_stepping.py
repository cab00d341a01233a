"""Engines that are to stop at the same time first launch one step at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# The most seconds that a swap waits until engines launch one step at a time. An engine that needs
# longer hangs, or its steps are so long that the others wait for it anyway.
_PATIENCE = 1.0


class SingleStepping:
    """Whether one engine launches one step at a time.

    The engine's thread reads `on` and reports its steps. `one_step_at_a_time` is for any other
    thread.

    Attributes:
        on: The engine launches a step once it has read the last step or the prefill before it.
    """

    def __init__(self) -> None:
        self.on = False
        self._stepping = False
        self._at_most_one = threading.Event()

    @contextmanager
    def steps_in_flight(self) -> Iterator[None]:
        """Steps may be in flight inside the block. When it ends, no request waits for one."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False
            self._at_most_one.set()

    def in_flight(self, steps: int) -> None:
        """Record how many steps are in flight."""
        if self.on and steps <= 1:
            self._at_most_one.set()

    def begin(self) -> None:
        self._at_most_one.clear()
        self.on = True
        if not self._stepping:
            self._at_most_one.set()

    def end(self) -> None:
        self.on = False

    def wait(self, seconds: float) -> bool:
        """Wait until at most one step is in flight; False if that takes longer."""
        return self._at_most_one.wait(seconds)


@contextmanager
def one_step_at_a_time(engines: Sequence[SingleStepping]) -> Iterator[None]:
    """Have engines launch one step at a time. The block begins when at most one is in flight, or
    after `_PATIENCE` seconds.

    The engine that stops first idles until the last one has stopped. Without this the last one
    may have two launches of several steps in flight.
    """
    try:
        for engine in engines:
            engine.begin()
        until = time.monotonic() + _PATIENCE
        for engine in engines:
            engine.wait(max(0.0, until - time.monotonic()))
        yield
    finally:
        for engine in engines:
            engine.end()
