"""Decides which waiting requests an engine may start, if there are more adapters than slots.

A pure class, without threads, clock or JAX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class SlotPolicy:
    """One look at the queue, oldest request first.

    The oldest request whose adapter has no slot gets the first free slot. If no slot is free, the
    adapter with the fewest running requests starts no more of them, so that its slot becomes free.

    Args:
        held: The adapters in slots, least recently used first.
        running: How many requests run, by adapter. Their adapters keep their slots.
        slots: The number of slots.
    """

    def __init__(self, held: Sequence[int], running: Mapping[int, int], slots: int) -> None:
        self._running = {number: count for number, count in running.items() if count}
        self._idle = [number for number in held if number not in self._running]
        self._open = slots - len(self._running)
        self._promised: set[int] = set()
        self._leaving: int | None = None

    def may_start(self, number: int | None) -> bool:
        """Whether a request under this adapter may start; None for the base."""
        if number is None or number in self._promised:
            return True
        if number in self._running:
            return number != self._leaving
        if self._open == 0:
            if self._leaving is None and self._running:
                self._leaving = min(self._running, key=lambda each: self._running[each])
            return False
        if number in self._idle:
            self._idle.remove(number)
        elif self._open == len(self._idle):  # no slot is empty
            self._idle.pop(0)
        self._open -= 1
        self._promised.add(number)
        return True
