"""How many decode steps a flight dispatches at once."""

from __future__ import annotations

# Dispatches that are looked at, and how many of them have to find the device without work.
_LOOKED_AT, _IDLE = 16, 4
# Dispatches of several steps after which one at a time is tried again.
_TRIED_AFTER = 128


class Pace:
    """Of one engine; on its thread.

    Several steps at once cost the host little more than one, but who waits for a step boundary
    waits for all of them. So they are one by one, unless the device is without work when the next
    one comes: its steps are short, or engines, streams and others share the host.

    Attributes:
        steps: For the next dispatch, at most.
    """

    def __init__(self, most: int) -> None:
        self.steps, self._most = 1, most
        self._seen = self._idle = 0

    def dispatched(self, *, idle: bool) -> None:
        """Another dispatch of a flight, which found the device idle or at work."""
        self._seen += 1
        self._idle += idle
        if self.steps == 1:
            if self._idle >= _IDLE:
                self._go_on(self._most)
            elif self._seen >= _LOOKED_AT:
                self._go_on(1)
        elif self._seen >= _TRIED_AFTER:
            self._go_on(1)

    def _go_on(self, steps: int) -> None:
        self.steps = steps
        self._seen = self._idle = 0
