"""How many decode steps one launch has."""

from __future__ import annotations

# If _IDLE of _LOOKED_AT launches find the device idle, launches get several steps.
_LOOKED_AT, _IDLE = 16, 2
# After this many launches of several steps, single steps are tried again.
_TRIED_AFTER = 128
# A launch has at most 1 / _SHARE of an output's steps. The length of an output is averaged over
# _OUTPUTS.
_SHARE, _OUTPUTS = 16, 16
# A launch takes about this many seconds while nobody waits for a step. The time of a step is
# averaged over _TIMED launches.
_PATIENCE, _TIMED = 0.040, 16


class Pace:
    """Chooses how many steps a launch of one engine has. Used on the engine's thread.

    A launch of several steps costs the host little more than a launch of one. But a request that
    waits for a step boundary or for a free row waits for the whole launch. There are three rules:

    - By default a launch has one step. If earlier launches found the device idle, the device waits
      for the host. Launches then have as many steps as they may.
    - If no request streams or waits, a launch has about 40 ms of steps. The host then has time for
      other threads.
    - If outputs are short, a launch has few steps.

    Attributes:
        length: Tokens of an output that decodes, on average. None: no such output has ended. An
            output that ends with its first token does not count: no launch waits for it.
    """

    def __init__(self, most: int) -> None:
        self._steps, self._most = 1, most
        self._seen = self._idle = 0
        self.length: float | None = None
        self._seconds: float | None = None  # of steps, on average

    def steps(self, *, without_delay: int) -> int:
        """How many steps the next launch has at most.

        Args:
            without_delay: How many steps it may have and delay no request that streams or waits.
        """
        steps = self._steps
        if steps == 1 and self._seconds:
            steps = min(self._most, without_delay, round(_PATIENCE / self._seconds))
        if self.length is not None:
            steps = min(steps, int(self.length / _SHARE))
        return max(1, steps)

    def took(self, seconds: float) -> None:
        """Record how long the device took for a step."""
        before = seconds if self._seconds is None else self._seconds
        self._seconds = before + (seconds - before) / _TIMED

    def ended(self, tokens: int) -> None:
        """Record the length of an output that has ended."""
        before = tokens if self.length is None else self.length
        self.length = before + (tokens - before) / _OUTPUTS

    def launched(self, *, idle: bool) -> None:
        """Record a launch, and whether it found the device idle."""
        self._seen += 1
        self._idle += idle
        if self._steps == 1:
            if self._idle >= _IDLE:
                self._set_steps(self._most)
            elif self._seen >= _LOOKED_AT:
                self._set_steps(1)
        elif self._seen >= _TRIED_AFTER:
            self._set_steps(1)

    def _set_steps(self, steps: int) -> None:
        self._steps = steps
        self._seen = self._idle = 0
