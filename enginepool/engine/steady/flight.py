"""Decode steps one after another, the next one dispatched before the last one's tokens are seen.

A flight begins where upstream would run a batch's step, and ends, landed, where upstream would
have processed it: with nothing in flight, and everything as upstream has it after a step. Whatever
wants a step boundary makes it land.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from enginepool.engine.steady.pages import Pages
from enginepool.engine.steady.program import Batch, StepProgram
from enginepool.engine.steady.rows import Rows

# Steps on their way at a time: one that runs, one that waits behind it.
_DEPTH = 2
# Steps for which KV pages are taken at once, where they are free; and where the prefix cache has
# to give them up. What is taken counts as used meanwhile.
_PAGES_AHEAD, _FEW_AHEAD = 32, 2 * _DEPTH


class Home(Protocol):
    """What a flight needs of the engine that it belongs to."""

    def step_begins(self) -> None:
        """Another step is dispatched, after the first."""

    def wait_for_device(self, result: Any) -> None:
        """Wait until a step's results are there."""

    def take_over(self, give: Callable[[], list[int]]) -> list[int]:
        """Call it while nobody takes requests away.

        Raises:
            StepTimeout: They were taken away.
        """
        ...

    def wants_boundary(self) -> bool:
        """Whether something waits for a step boundary."""
        ...

    def release(self, req: Any) -> None:
        """A request has ended: what it held of the KV cache is the prefix cache's."""

    def hand_over(self, reqs: list[Any]) -> None:
        """Requests have ended, or are streamed and have a new token."""


class Flight:
    """One of them, from take-off to landing; on the engine's thread.

    Attributes:
        steps: How many of its steps are booked.
    """

    def __init__(
        self, home: Home, program: StepProgram, rows: Rows, pages: Pages, sampling: Any
    ) -> None:
        self._home, self._program, self._rows, self._pages = home, program, rows, pages
        self._sampling = sampling
        self._on_their_way: deque[jax.Array] = deque()
        self._dispatched = 0
        self._covered = 0  # steps for which every row has pages
        self._landing = False
        self.steps = 0

    def take_off(self, last_ids: np.ndarray, most: int | None) -> bool:
        """Run until something makes it land; False, with nothing done, if there are no KV pages.

        Args:
            most: Steps after which it lands in any case.

        Raises:
            Exception: A step failed, or the requests were taken away. Tokens that were fetched are
                in upstream's requests; nothing else there is in order.
        """
        rows = self._rows
        if not self._cover(_DEPTH):
            return False
        self._place()
        state = np.zeros((2, len(rows.limits)), np.int32)
        state[:, : len(last_ids)] = last_ids, rows.lengths
        self._state = self._program.place(state)
        while True:
            while self._may_dispatch(most):
                self._dispatch()
            if not self._on_their_way or not len(rows.live):
                break
            self._take(self._on_their_way.popleft())
            self._landing = self._landing or self._home.wants_boundary()
        self._land()
        return True

    def _may_dispatch(self, most: int | None) -> bool:
        ahead = len(self._on_their_way)
        if self._landing or ahead == _DEPTH or ahead >= self._rows.most_left:
            return False
        if self._dispatched == most or self._fits_fewer_rows() or not self._cover(1):
            self._landing = True
        return not self._landing

    def _fits_fewer_rows(self) -> bool:
        return self._program.bucket(len(self._rows.live)) < len(self._rows.limits)

    def _cover(self, least: int) -> bool:
        """Whether there are KV pages for so many more steps."""
        if self._dispatched + least <= self._covered:
            return True
        for ahead, evict in ((_PAGES_AHEAD, False), (_FEW_AHEAD, True)):
            steps = self._dispatched + ahead
            lengths = self._rows.lengths_in(steps)
            if self._pages.cover(self._rows.live, lengths, evict=evict):
                self._covered = steps
                if self._dispatched:
                    self._place()
                return True
        return False

    def _place(self) -> None:
        """Send what the host has changed of the batch."""
        place = self._program.place
        # Copied: on CPU an array on a device may be the very memory.
        limits, table = place(self._rows.limits.copy()), place(self._pages.table.copy())
        self._batch = Batch(limits, table, self._sampling)

    def _dispatch(self) -> None:
        if self._dispatched:
            self._home.step_begins()
        self._state, sampled = self._program.step(self._state, self._batch)
        self._on_their_way.append(sampled)
        self._dispatched += 1

    def _take(self, sampled: jax.Array) -> None:
        """Book a step."""
        rows, home = self._rows, self._home
        home.wait_for_device(sampled)
        ids, bits = np.asarray(sampled)
        logprobs = bits.view(np.float32)
        before = rows.live
        ended = home.take_over(lambda: rows.book(ids, logprobs))
        self.steps += 1
        if ended:
            self._end(ended)
        if not np.isfinite(logprobs[before]).all():
            # What was sampled after this is of no use; the next step is upstream's.
            self._on_their_way.clear()
            self._landing = True
            home.hand_over([rows.reqs[row] for row in before])
        elif news := [*ended, *rows.streamed]:
            home.hand_over([rows.reqs[row] for row in news])

    def _end(self, ended: list[int]) -> None:
        rows = self._rows
        by_host = rows.watched.intersection(ended)
        self._pages.settle(np.array(ended), rows.settle(ended))
        for row in ended:
            self._home.release(rows.reqs[row])
        rows.leave(ended)
        if by_host and len(rows.live):
            self._place()  # a step that is on its way still computes them, for nobody

    def _land(self) -> None:
        rows = self._rows
        if len(rows.live):
            self._pages.settle(rows.live, rows.settle(rows.live))
        rows.land()
