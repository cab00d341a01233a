"""How many decode steps a flight dispatches at once."""

from __future__ import annotations

# Dispatches that are looked at, and how many of them have to find the device without work.
_LOOKED_AT, _IDLE = 16, 2
# Dispatches of several steps after which one at a time is tried again.
_TRIED_AFTER = 128
# What a dispatch may have at most of an output's steps, and over how many outputs that is averaged.
_SHARE, _OUTPUTS = 16, 16
# Seconds that a dispatch takes about where nobody waits for a step, and over how many dispatches a
# step's time is averaged.
_PATIENCE, _TIMED = 0.040, 16


class Pace:
    """Of one engine; on its thread.

    Several steps at once cost the host little more than one, but who waits for a step boundary
    waits for all of them, and so does whoever could have the row of one that has ended among them.
    So they are one by one, unless the device is without work when the next one comes: its steps are
    short, or engines, streams and others share the host. Where nobody streams and nobody waits,
    they are as many as take about 40 ms: the host, which others in the process need, has less to
    do. And they are few where outputs are short.
    """

    def __init__(self, most: int) -> None:
        self._steps, self._most = 1, most
        self._seen = self._idle = 0
        self._length: float | None = None  # of outputs, on average
        self._seconds: float | None = None  # of steps, on average

    def steps(self, *, calm: bool) -> int:
        """For the next dispatch, at most.

        Args:
            calm: Whether nobody streams or waits to join.
        """
        steps = self._steps
        if steps == 1 and calm and self._seconds:
            steps = min(self._most, round(_PATIENCE / self._seconds))
        if self._length is not None:
            steps = min(steps, int(self._length / _SHARE))
        return max(1, steps)

    def took(self, seconds: float) -> None:
        """A step of the device's, from the one before it to this one."""
        before = seconds if self._seconds is None else self._seconds
        self._seconds = before + (seconds - before) / _TIMED

    def ended(self, tokens: int) -> None:
        """An output has ended, with so many."""
        before = tokens if self._length is None else self._length
        self._length = before + (tokens - before) / _OUTPUTS

    def dispatched(self, *, idle: bool) -> None:
        """Another dispatch of a flight, which found the device idle or at work."""
        self._seen += 1
        self._idle += idle
        if self._steps == 1:
            if self._idle >= _IDLE:
                self._go_on(self._most)
            elif self._seen >= _LOOKED_AT:
                self._go_on(1)
        elif self._seen >= _TRIED_AFTER:
            self._go_on(1)

    def _go_on(self, steps: int) -> None:
        self._steps = steps
        self._seen = self._idle = 0
