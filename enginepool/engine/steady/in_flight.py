"""Decode steps that are launched and whose results have not been fetched.

The next step is launched before the host has seen the tokens of the last one. A launch is one step,
or several in a loop on the device.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from enginepool.engine.steady.batch import Sampled
from enginepool.engine.steady.pages import Pages
from enginepool.engine.steady.penalties import entries
from enginepool.engine.steady.program import StepProgram
from enginepool.engine.steady.rows import Rows

# KV pages are allocated for so many steps at once while some are free, and for so few once the
# prefix cache has to evict. Allocated pages count as used.
_PAGES_AHEAD, _FEW_AHEAD = 32, 4


class StepsInFlight:
    """The steps in flight of one batch, and what the device needs for the next one.

    Used on the engine's thread.

    Attributes:
        rows: The requests of the batch.
        launched: How many steps were launched.
        closed: No further step is launched, and no request joins.
    """

    def __init__(
        self, program: StepProgram, rows: Rows, pages: Pages, reqs: list[Any], limit: int | None
    ) -> None:
        """
        Args:
            reqs: Upstream's requests, which it has prepared for a decode step.
            limit: How many steps are launched at most.
        """
        self.rows, self._program, self._pages = rows, program, pages
        self.launched = 0
        self.closed = False
        self._limit = limit
        self._outputs: deque[tuple[Sampled, int]] = deque()
        self._covered = 0  # steps for which every row has KV pages
        # The device has an old copy of the batch, or of its table of pages alone.
        self._stale, self._table_stale = True, False
        new = rows.seat(reqs, after=0)
        pages.seat(new, reqs)
        self._state = program.begin(rows.state)
        self._tally(new)

    @property
    def launches(self) -> int:
        """How many launches are in flight."""
        return len(self._outputs)

    @property
    def steps(self) -> int:
        """How many steps are launched and not booked."""
        return self.launched - self.rows.steps

    @property
    def room(self) -> int:
        """How many requests may join."""
        return 0 if self.closed else self.rows.free

    @property
    def idle(self) -> bool | None:
        """Whether the device has finished all that was launched; None if nothing was."""
        if not self.launched:
            return None
        if not self._outputs:
            return True
        ids: Any = self._outputs[-1][0].ids  # JAX's types do not have `is_ready`
        return ids.is_ready()

    @property
    def most_next(self) -> int:
        """How many steps are left for the next launch. 0 or less: none may be launched now."""
        if self.closed:
            return 0
        left = self.rows.most_left - self.steps
        if self.rows.grammars:
            # A mask depends on the token before it.
            return 0 if self._outputs else min(left, 1)
        return left

    def join(self, reqs: list[Any]) -> None:
        """Add requests that are prefilled. They take part from the next launch on."""
        new = self.rows.seat(reqs, after=self.launched)
        self._pages.seat(new, reqs)
        self._covered, self._stale = 0, True
        self._state = self._program.seat(self._state, new, self.rows.state)
        self._tally(new)

    def _tally(self, rows: list[int]) -> None:
        """Count the tokens that these rows already have, for their penalties."""
        penalised = [row for row in rows if row in self.rows.penalised]
        if penalised:
            found = entries(penalised, self.rows.reqs)
            self._state = self._program.tally(self._state, penalised, found)

    def prepare(self, steps: int) -> int:
        """Send the device what the next launch needs.

        Args:
            steps: How many the launch is to have, up to `most_next`.

        Returns:
            How many it can have. 0: the limit is reached, the batch fits a smaller program, or the
            KV cache is full. Nothing more is launched then.
        """
        if self._limit is not None:
            steps = min(steps, self._limit - self.launched)
        if steps == 0 or self._fits_fewer_rows() or not (steps := self._cover(steps)):
            self.closed = True
            return 0
        sender = self._program.sender
        if self._stale:
            rows, table = self.rows, self._pages.table
            self._batch = sender.batch(
                rows.limits, table, rows.sampling, rows.penalties, rows.names, rows.form
            )
        elif self._table_stale:
            self._batch = self._batch._replace(table=sender.place(self._pages.table.copy()))
        self._stale = self._table_stale = False
        if self.rows.grammars:
            self._batch = sender.masked(self._batch, self.rows.grammars)
        return steps

    def launch(self, steps: int) -> None:
        """Launch as many steps as were prepared."""
        self._state, sampled = self._program.step(self._state, self._batch, steps)
        self._outputs.append((sampled, steps))
        self.launched += steps

    def oldest(self) -> tuple[Sampled, int]:
        """Take out the oldest launch: its output, and how many steps it has."""
        return self._outputs.popleft()

    def drop(self) -> None:
        """Forget what is in flight, and launch no more."""
        self._outputs.clear()
        self.closed = True

    def remove(self, ended: list[int]) -> list[Any]:
        """Free the rows of requests that have ended, and KV pages that they did not use.

        Returns:
            The requests. Upstream's account of each is up to date.
        """
        rows = self.rows
        by_host = not rows.watched.isdisjoint(ended)
        form = rows.form
        self._settle(np.array(ended))
        rows.leave(ended)
        # The device itself has ended the others.
        self._stale = self._stale or by_host or rows.form != form
        return [rows.reqs[row] for row in ended]

    def settle(self) -> None:
        """Bring upstream's account of all requests up to date."""
        if len(self.rows.seated):
            self._settle(self.rows.seated)

    def _settle(self, rows: np.ndarray) -> None:
        self._pages.settle(rows, self.rows.settle(rows))

    def _fits_fewer_rows(self) -> bool:
        return self._program.bucket(len(self.rows.seated)) < len(self.rows.limits)

    def _cover(self, steps: int) -> int:
        """Allocate KV pages for the next steps. Returns for how many there are enough."""
        if self.launched + steps <= self._covered:
            return steps
        few = max(_FEW_AHEAD, steps)
        for ahead, evict in ((_PAGES_AHEAD, False), (few, True), (_FEW_AHEAD, True), (1, True)):
            if self._limit is not None:
                ahead = min(ahead, self._limit - self.launched)
            lengths = self.rows.lengths_in(self.launched + ahead)
            changed = self._pages.cover(self.rows.seated, lengths, evict=evict)
            if changed is not None:
                self._covered = self.launched + ahead
                self._table_stale = self._table_stale or changed
                return min(steps, ahead)
        return 0
