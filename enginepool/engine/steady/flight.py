"""Decode steps one after another, the next one dispatched before the last one's tokens are seen.

A flight begins where upstream would run a batch's step, and ends, landed, where upstream would
have processed it: with nothing in flight, and everything as upstream has it after a step. Whatever
wants a step boundary makes it land; requests that are prefilled meanwhile may join it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    def dispatch(self, state: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """See `StepProgram.step`."""
        ...

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
        self._on_their_way: deque[jax.Array] = deque()
        self._dispatched = 0
        self._covered = 0  # steps for which every row has pages
        self._most: int | None = None
        self._stale = True  # the host has changed what the device has of the batch
        self._landing = False

    @property
    def room(self) -> int:
        """How many requests may join it."""
        return 0 if self._landing else self._rows.free

    def take_off(self, reqs: list[Any], most: int | None) -> bool:
        """Run until something makes it land; False, with nothing done, if there are no KV pages.

        Args:
            reqs: Upstream's requests, which it has prepared for a decode step.
            most: Steps after which it lands in any case.

        Raises:
            Exception: A step failed, or the requests were taken away. Tokens that were fetched are
                in upstream's requests; nothing else there is in order.
        """
        self._pages.seat(self._rows.seat(reqs, after=0), reqs)
        if not self._cover(_DEPTH):
            return False
        self._most = most
        self._state = self._program.place(self._rows.state.copy())
        while True:
            with self._keeping_what_is_dispatched():
                while len(self._on_their_way) < _DEPTH and self.dispatch():
                    pass
            if not self._on_their_way or not len(self._rows.seated):
                break
            self._take(self._on_their_way.popleft())
            with self._keeping_what_is_dispatched():
                self._landing = self._landing or self._home.wants_boundary(self)
        self._land()
        return True

    @contextmanager
    def _keeping_what_is_dispatched(self) -> Iterator[None]:
        """An error does not concern the steps before: what they bring is booked first."""
        try:
            yield
        except BaseException:
            while self._on_their_way:
                self._take(self._on_their_way.popleft())
            raise

    def join(self, reqs: list[Any]) -> None:
        """Requests that are prefilled take part from the next step that is dispatched."""
        rows = self._rows.seat(reqs, after=self._dispatched)
        self._pages.seat(rows, reqs)
        self._covered, self._stale = 0, True
        self._state = self._program.seat(self._state, rows, self._rows.state)

    def dispatch(self) -> bool:
        """Dispatch another step, if there is one; returns whether it did."""
        if self._landing or len(self._on_their_way) >= self._rows.most_left:
            return False
        if self._dispatched == self._most or self._fits_fewer_rows() or not self._cover(1):
            self._landing = True
            return False
        if self._stale:
            rows, table = self._rows, self._pages.table
            self._batch = self._program.place_batch(rows.limits, table, rows.sampling)
            self._stale = False
        if self._dispatched:
            self._home.step_begins()
        self._state, sampled = self._home.dispatch(self._state, self._batch)
        self._on_their_way.append(sampled)
        self._dispatched += 1
        return True

    def _fits_fewer_rows(self) -> bool:
        return self._program.bucket(len(self._rows.seated)) < len(self._rows.limits)

    def _cover(self, least: int) -> bool:
        """Whether there are KV pages for so many more steps."""
        if self._dispatched + least <= self._covered:
            return True
        for ahead, evict in ((_PAGES_AHEAD, False), (_FEW_AHEAD, True)):
            steps = self._dispatched + ahead
            lengths = self._rows.lengths_in(steps)
            changed = self._pages.cover(self._rows.seated, lengths, evict=evict)
            if changed is not None:
                self._covered = steps
                self._stale = self._stale or changed
                return True
        return False

    def _take(self, sampled: jax.Array) -> None:
        """Book a step."""
        rows, home = self._rows, self._home
        home.wait_for_device(sampled)
        ids, bits = np.asarray(sampled)
        logprobs = bits.view(np.float32)
        ended = home.take_over(lambda: rows.book(ids, logprobs))
        live = rows.live
        if ended:
            self._end(ended)
        if not np.isfinite(logprobs[live]).all():
            # What was sampled after this is of no use; the next step is upstream's.
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
        rows.leave(ended)
        self._stale = self._stale or bool(by_host)  # the device has ended the others itself

    def _land(self) -> None:
        rows = self._rows
        if len(rows.seated):
            self._pages.settle(rows.seated, rows.settle(rows.seated))
