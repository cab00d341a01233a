"""How engines come to a step boundary together: one step at a time, until all of them do so."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# Seconds that engines are waited for at most. One that needs longer hangs, or its steps are so
# long that others wait for them anyway.
_PATIENCE = 1.0


class Approach:
    """One engine's part in it; the engine's thread asks and tells, `together` is for any other.

    Attributes:
        begun: No step is dispatched before the one before it has come back.
    """

    def __init__(self) -> None:
        self.begun = False
        self._flying = False
        self._close = threading.Event()

    @contextmanager
    def flight(self) -> Iterator[None]:
        """Steps are on their way in the block, and none when it ends."""
        self._flying = True
        try:
            yield
        finally:
            self._flying = False
            self._close.set()

    def on_their_way(self, steps: int) -> None:
        """So many steps have not come back."""
        if self.begun and steps <= 1:
            self._close.set()

    def begin(self) -> None:
        self._close.clear()
        self.begun = True
        if not self._flying:
            self._close.set()

    def end(self) -> None:
        self.begun = False

    def wait(self, seconds: float) -> bool:
        """Wait until a step at most is on its way; False if that takes longer."""
        return self._close.wait(seconds)


@contextmanager
def together(approaches: Sequence[Approach]) -> Iterator[None]:
    """Engines that generate are within a step of a boundary when the block begins, and go on one
    step at a time until it ends.

    Whoever comes to a boundary first stands until the last is there. Without this that may be two
    dispatches of several steps, in which all others could have had tokens.
    """
    try:
        for approach in approaches:
            approach.begin()
        until = time.monotonic() + _PATIENCE
        for approach in approaches:
            approach.wait(max(0.0, until - time.monotonic()))
        yield
    finally:
        for approach in approaches:
            approach.end()
