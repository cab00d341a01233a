"""How engines come to a step boundary together: one step a dispatch, until all of them do so."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# Seconds that engines are waited for at most. One that needs longer hangs, or its steps are so
# long that it dispatches one at a time anyway.
_PATIENCE = 1.0


class Approach:
    """One engine's part in it; asked and told on the engine's thread, but for `together`.

    Attributes:
        begun: A dispatch has one step from now on.
    """

    def __init__(self) -> None:
        self.begun = False
        self._close = threading.Event()
        self._close.set()

    def on_their_way(self, steps: int) -> None:
        """So many steps the longest dispatch has that has not come back."""
        if steps > 1:
            self._close.clear()
        elif not self._close.is_set():
            self._close.set()

    def wait(self, seconds: float) -> bool:
        """Wait until no dispatch of several steps is on its way; False if that takes longer."""
        return self._close.wait(seconds)


@contextmanager
def together(approaches: Sequence[Approach]) -> Iterator[None]:
    """Engines that generate come within a step of each other before the block begins, and go on
    one by one until it ends.

    Whoever comes to a boundary first stands until the last is there. Without this that is a
    dispatch of several steps, during which all others could have had tokens.
    """
    try:
        for approach in approaches:
            approach.begun = True
        until = time.monotonic() + _PATIENCE
        for approach in approaches:
            approach.wait(max(0.0, until - time.monotonic()))
        yield
    finally:
        for approach in approaches:
            approach.begun = False
