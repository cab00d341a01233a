"""How long a prefill is put off, so that more requests share it."""

from __future__ import annotations

# The most steps that a prefill is put off.
_STEPS = 32


class PrefillDelay:
    """Puts the prefills of one engine off. Used on the engine's thread.

    A prefill costs every running request a step. A step without a prefill costs every free row a
    step. So a prefill is due when the free rows have lost as many steps as there are running
    requests. The sum of both costs is smallest then (F. W. Harris, 1913, on the size of orders).

    A prefill is put off only under two conditions. More requests wait than there are free rows. And
    another output ends soon. On average one ends every `length / running` steps. Soon means within
    `running` steps: after these a single free row makes the prefill due.
    """

    def __init__(self) -> None:
        self._lost = self._steps = 0  # since there are free rows

    def restart(self) -> None:
        """Record a prefill: begin to count again."""
        self._lost = self._steps = 0

    def ran(self, steps: int, *, free: int) -> None:
        """Record that steps have run while `free` rows were free."""
        if free:
            self._lost, self._steps = self._lost + free * steps, self._steps + steps
        else:
            self.restart()

    def left(
        self, *, waiting: int, free: int, running: int, length: float | None, ahead: int
    ) -> int:
        """How many more steps the next prefill is put off. 0: it is due.

        Args:
            waiting: How many requests wait for this engine.
            free: How many more requests could run.
            running: How many run.
            length: Tokens of an output, on average. None: that is not known yet.
            ahead: How many steps are in flight. A prefill runs after them.
        """
        if waiting <= free or length is None or running**2 <= length:
            return 0
        if not free:
            return min(running, _STEPS)
        lost = self._lost + free * ahead
        return max(0, min(-((lost - running) // free), _STEPS - self._steps - ahead))
