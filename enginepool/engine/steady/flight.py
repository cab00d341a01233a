"""Decode steps one after another, the next one dispatched before the last one's tokens are seen.

A flight begins where upstream would run a batch's step, and ends, landed, where upstream would
have processed it: with nothing in flight, and everything as upstream has it after a step. Whatever
wants a step boundary makes it land; requests that are prefilled meanwhile may join it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import jax
import numpy as np

from enginepool.engine.steady.batch import Batch, Sampled, State
from enginepool.engine.steady.pages import Pages
from enginepool.engine.steady.penalties import entries
from enginepool.engine.steady.program import StepProgram
from enginepool.engine.steady.rows import Rows

# Dispatches on their way at a time: one that runs, one that waits behind it.
_DEPTH = 2
# Steps for which KV pages are taken at once, where they are free; and where the prefix cache has
# to give them up. What is taken counts as used meanwhile.
_PAGES_AHEAD, _FEW_AHEAD = 32, 2 * _DEPTH


class Home(Protocol):
    """What a flight needs of the engine that it belongs to."""

    @property
    def one_by_one(self) -> bool:
        """Whether a step is dispatched only when the one before it has come back."""
        ...

    def steps_at_once(self, *, idle: bool | None, streamed: bool) -> int:
        """How many steps the next dispatch should have at most.

        Args:
            idle: Whether the device is without work; None at take-off.
            streamed: Whether a caller sees every token.
        """
        ...

    def step_took(self, seconds: float) -> None:
        """So long after the step before it a step was done."""

    def dispatch(self, state: State, batch: Batch, steps: int) -> tuple[State, Sampled]:
        """See `StepProgram.step`."""
        ...

    def steps_begin(self, steps: int) -> None:
        """So many steps are dispatched, beside the flight's first."""

    def wait_for_device(self, result: Any) -> None:
        """Wait until a step's results are there."""

    def take_over(self, give: Callable[[], list[int]], steps: int) -> list[int]:
        """Call it, for so many steps, while nobody takes requests away.

        Raises:
            StepTimeout: They were taken away.
        """
        ...

    def wants_boundary(self, flight: Flight) -> bool:
        """Whether something waits for a step boundary. Requests may join the flight instead."""
        ...

    def release(self, req: Any) -> None:
        """A request has ended: what it held of the KV cache is the prefix cache's."""

    def hand_over(self, reqs: list[Any]) -> None:
        """Requests have ended, or are streamed and have a new token."""


class Flight:
    """One of them, from take-off to landing; on the engine's thread."""

    def __init__(self, home: Home, program: StepProgram, rows: Rows, pages: Pages) -> None:
        self._home, self._program, self._rows, self._pages = home, program, rows, pages
        self._on_their_way: deque[tuple[Sampled, int]] = deque()
        self._dispatched = 0  # steps
        self._covered = 0  # steps for which every row has pages
        self._most: int | None = None
        # The host has changed what the device has of the batch, or pages of rows alone.
        self._stale, self._table_stale = True, False
        self._landing = False
        self._taken_at: float | None = None

    @property
    def on_their_way(self) -> int:
        """How many steps are dispatched and not booked."""
        return self._dispatched - self._rows.steps

    @property
    def room(self) -> int:
        """How many requests may join it."""
        return 0 if self._landing else self._rows.free

    def take_off(self, reqs: list[Any], most: int | None) -> None:
        """Run until something makes it land, which is after one step at least: upstream has
        allocated what that needs.

        Args:
            reqs: Upstream's requests, which it has prepared for a decode step.
            most: Steps after which it lands in any case.

        Raises:
            Exception: A step failed, or the requests were taken away. Tokens that were fetched are
                in upstream's requests; nothing else there is in order.
        """
        rows = self._rows.seat(reqs, after=0)
        self._pages.seat(rows, reqs)
        self._most = most
        self._state = self._program.begin(self._rows.state)
        self._count(rows)
        while True:
            with self._keeping_what_is_dispatched():
                depth = 1 if self._home.one_by_one else _DEPTH
                while len(self._on_their_way) < depth and self.dispatch():
                    pass
            if not self._on_their_way or not len(self._rows.seated):
                break
            self._take(*self._on_their_way.popleft())
            with self._keeping_what_is_dispatched():
                self._landing = self._landing or self._home.wants_boundary(self)
        self._land()

    @contextmanager
    def _keeping_what_is_dispatched(self) -> Iterator[None]:
        """An error does not concern the steps before: what they bring is booked first."""
        try:
            yield
        except BaseException:
            while self._on_their_way:
                self._take(*self._on_their_way.popleft())
            raise

    def join(self, reqs: list[Any]) -> None:
        """Requests that are prefilled take part from the next step that is dispatched."""
        rows = self._rows.seat(reqs, after=self._dispatched)
        self._pages.seat(rows, reqs)
        self._covered, self._stale = 0, True
        self._state = self._program.seat(self._state, rows, self._rows.state)
        self._count(rows)

    def _count(self, rows: list[int]) -> None:
        """What these rows have given so far counts for their penalties."""
        penalised = [row for row in rows if row in self._rows.penalised]
        if penalised:
            found = entries(penalised, self._rows.reqs)
            self._state = self._program.tally(self._state, penalised, found)

    def dispatch(self) -> bool:
        """Dispatch what comes next, if there is something; returns whether it did."""
        left = self._rows.most_left - self.on_their_way
        if self._landing or left <= 0:
            return False
        if self._rows.grammars and self._on_their_way:
            return False  # what may come next depends on what comes
        streamed = bool(self._rows.streamed)
        steps = min(left, self._home.steps_at_once(idle=self._idle(), streamed=streamed))
        if self._rows.grammars:
            steps = min(steps, 1)
        if self._most is not None:
            steps = min(steps, self._most - self._dispatched)
        if steps == 0 or self._fits_fewer_rows() or not (steps := self._cover(steps)):
            self._landing = True
            return False
        if self._stale:
            self._place()
        elif self._table_stale:
            table = self._program.sender.place(self._pages.table.copy())
            self._batch = self._batch._replace(table=table)
        self._stale = self._table_stale = False
        if self._rows.grammars:
            self._batch = self._program.sender.masked(self._batch, self._rows.grammars)
        self._home.steps_begin(steps if self._dispatched else steps - 1)
        self._state, sampled = self._home.dispatch(self._state, self._batch, steps)
        self._on_their_way.append((sampled, steps))
        self._dispatched += steps
        return True

    def _idle(self) -> bool | None:
        """Whether the device is done with all that was dispatched; None if nothing was."""
        if not self._dispatched:
            return None
        if not self._on_their_way:
            return True
        ids: Any = self._on_their_way[-1][0].ids  # JAX's types do not have `is_ready`
        return ids.is_ready()

    def _place(self) -> None:
        rows, table = self._rows, self._pages.table
        self._batch = self._program.sender.batch(
            rows.limits, table, rows.sampling, rows.penalties, rows.names, rows.form
        )

    def _fits_fewer_rows(self) -> bool:
        return self._program.bucket(len(self._rows.seated)) < len(self._rows.limits)

    def _cover(self, steps: int) -> int:
        """Take KV pages for so many more steps; returns for how many there are any."""
        if self._dispatched + steps <= self._covered:
            return steps
        few = max(_FEW_AHEAD, steps)
        for ahead, evict in ((_PAGES_AHEAD, False), (few, True), (_FEW_AHEAD, True), (1, True)):
            if self._most is not None:
                ahead = min(ahead, self._most - self._dispatched)
            lengths = self._rows.lengths_in(self._dispatched + ahead)
            changed = self._pages.cover(self._rows.seated, lengths, evict=evict)
            if changed is not None:
                self._covered = self._dispatched + ahead
                self._table_stale = self._table_stale or changed
                return min(steps, ahead)
        return 0

    def _take(self, sampled: Sampled, steps: int) -> None:
        """Book what was dispatched at once."""
        rows, home = self._rows, self._home
        home.wait_for_device(sampled.ids)
        now = time.perf_counter()
        if self._taken_at is not None:
            home.step_took((now - self._taken_at) / steps)
        self._taken_at = now
        ids, logprobs = _numbers(sampled.ids, steps)
        form = rows.form
        top = _numbers(sampled.top, steps) if form.top else None
        named = np.asarray(sampled.named)[:steps] if form.named else None
        ended = home.take_over(lambda: rows.book(ids, logprobs, top, named), steps)
        live = rows.live
        if ended:
            self._end(ended)
        if rows.broken:
            # What was sampled after this is of no use.
            self._on_their_way.clear()
            self._landing = True
            home.hand_over([rows.reqs[row] for row in live])
        elif news := [*ended, *sorted(rows.streamed.intersection(live.tolist()))]:
            home.hand_over([rows.reqs[row] for row in news])

    def _end(self, ended: list[int]) -> None:
        rows = self._rows
        by_host = rows.watched.intersection(ended)
        which = np.array(ended)
        self._pages.settle(which, rows.settle(which))
        for row in ended:
            self._home.release(rows.reqs[row])
        form = rows.form
        rows.leave(ended)
        # The device has ended the others itself.
        self._stale = self._stale or bool(by_host) or rows.form != form

    def _land(self) -> None:
        rows = self._rows
        if len(rows.seated):
            self._pages.settle(rows.seated, rows.settle(rows.seated))


def _numbers(array: jax.Array, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """By step: ids, and the values that their bits are."""
    numbers = np.asarray(array)[:steps]
    return numbers[:, 0], numbers[:, 1].view(np.float32)
