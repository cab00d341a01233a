"""Steps that are launched and whose output the host has not read, in the device's order.

The next step is launched before the host reads the last one's tokens. A launch of decode is one
step, or several steps in a loop on the device. A prefill may lie between two of them. Its requests
take part in the launch after it: the device has their first ids.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from enginepool.engine.steady.block_table import BlockTable
from enginepool.engine.steady.device_batch import (
    FROM_PREFILL,
    FROM_TABLE,
    UNCHANGED,
    DecodeState,
    StepOutput,
)
from enginepool.engine.steady.input_batch import InputBatch
from enginepool.engine.steady.penalties import entries
from enginepool.engine.steady.program import StepProgram

if TYPE_CHECKING:
    import jax
    from sgl_jax.srt.managers.schedule_batch import Req

    from enginepool.engine.steady.prefill import LaunchedPrefill

# KV pages are allocated for _PAGES_AHEAD steps at once while some are free. Once the prefix cache
# has to evict, they are allocated for _FEW_AHEAD steps. Allocated pages count as used.
_PAGES_AHEAD, _FEW_AHEAD = 32, 8


class LaunchedSteps(NamedTuple):
    """A launch of decode. `steps` says how many it has."""

    output: StepOutput
    steps: int


class StepsInFlight:
    """The steps in flight of one batch, and what the device needs for the next one.

    Used on the engine's thread.

    Attributes:
        batch: Its requests, on the host.
        launched: How many decode steps were launched.
        launches: How many launches of decode are in flight.
        prefill: The prefill that is in flight, if there is one.
        closed: No further step is launched, and no waiting request is admitted.
    """

    def __init__(
        self,
        program: StepProgram,
        batch: InputBatch,
        block_table: BlockTable,
        reqs: list[Req],
        limit: int | None,
    ) -> None:
        """
        Args:
            reqs: Upstream's requests, which it has prepared for a decode step.
            limit: How many steps are launched at most.
        """
        self.batch, self._program, self._block_table = batch, program, block_table
        self.launched = self.launches = 0
        self.prefill: LaunchedPrefill | None = None
        self.closed = False
        self._limit = limit
        self._in_order: deque[LaunchedSteps | LaunchedPrefill] = deque()
        self._allocated = 0  # how many steps every row has KV pages for
        self._stale = True  # the device has an old copy of the batch
        self._state: DecodeState | None = None
        self._new: list[int] = []  # rows of which the device's state knows nothing
        self._samples: jax.Array | None = None  # the first ids of some of them
        self._replaces = False  # the next launch puts new rows into the device's state
        self.add_requests(reqs)

    @property
    def any_left(self) -> bool:
        """Whether something is in flight that a request waits for."""
        return self.prefill is not None or bool(self.launches and len(self.batch.active))

    @property
    def steps(self) -> int:
        """How many decode steps are in flight."""
        return self.launched - self.batch.steps

    @property
    def room(self) -> int:
        """How many requests can be added."""
        return 0 if self.closed else self.batch.free

    @property
    def idle(self) -> bool | None:
        """Whether the device has finished all that was launched; None if nothing was."""
        if not self.launched:
            return None
        if not self._in_order:
            return True
        ids: Any = self._in_order[-1].output.ids  # JAX's types do not have `is_ready`
        return ids.is_ready()

    @property
    def most_next(self) -> int:
        """How many steps are left for the next launch. 0 or less: none may be launched now."""
        if self.closed:
            return 0
        left = self.batch.most_left - self.steps
        if self.batch.grammars:
            # A mask depends on the token before it.
            return 0 if self._in_order else min(left, 1)
        return left

    def add_requests(self, reqs: list[Req], origins: list[int] | None = None) -> list[int]:
        """Add requests that are prefilled. They take part from the next launch on.

        Args:
            origins: See `InputBatch.add_requests`. By default they have their first ids.

        Returns:
            Their rows.
        """
        new = self.batch.add_requests(reqs, origins or [FROM_TABLE] * len(reqs), self.launched)
        self._block_table.add_rows(new, reqs)
        self._allocated, self._stale = 0, True
        self._new += new
        return new

    def add_prefill(self, prefill: LaunchedPrefill) -> None:
        """Add a launched prefill, and its requests that can decode before the host knows their
        first ids."""
        self._in_order.append(prefill)
        self.prefill, self._samples = prefill, prefill.output.ids
        if prefill.joining:
            reqs = [req for _, req in prefill.joining]
            origins = [FROM_PREFILL + row for row, _ in prefill.joining]
            prefill.rows += self.add_requests(reqs, origins)

    def take_first_ids(self, prefill: LaunchedPrefill) -> None:
        """Record the first ids of the requests that came with this prefill.

        Raises:
            RuntimeError: The device has ended a row, and upstream has not.
        """
        batch, rows = self.batch, prefill.rows
        if not rows:
            return
        reqs = [batch.reqs[row] for row in rows]
        ids, limits = np.array([req.output_ids[-1] for req in reqs]), batch.limits[rows]
        over = (ids[:, None] == limits[:, 1:]).any(axis=1) | (batch.state[1, rows] >= limits[:, 0])
        ended = [row for row, req in zip(rows, reqs, strict=True) if req.finished()]
        if wrong := set(np.array(rows)[over].tolist()).difference(ended):
            raise RuntimeError(f"the device has ended {batch.reqs[min(wrong)]}, upstream has not")
        # If the prefix cache already had the same tokens, it has freed the pages of these requests.
        self._stale = self._block_table.refresh(rows) or bool(ended) or self._stale
        for row, token in zip(rows, ids.tolist(), strict=True):
            if row in self._new:  # it is sent later, when `_samples` may be another prefill's
                batch.state[0, row], batch.table.origin[row] = token, FROM_TABLE
        if ended:
            self.remove(ended)

    def _begin_rows(self, numbers: jax.Array) -> None:
        """Prepare the new rows' state on the device. If there is no state yet, make one that has
        them. Otherwise the next launch puts them into the state. The tokens that they already
        have are added to their tallies.

        Args:
            numbers: The batch as it was sent.
        """
        program, batch = self._program, self.batch
        self._replaces = self._state is not None
        state = program.begin(numbers) if self._state is None else self._state
        # A row may be in `_new` twice: its first request has ended before it was sent.
        if penalised := sorted(batch.penalised.intersection(self._new)):
            state = program.tally(state, penalised, entries(penalised, batch.reqs))
        self._state = state
        batch.table.origin[self._new] = UNCHANGED
        self._new = []

    def end_within(self, steps: int) -> None:
        """Launch at most this many more steps."""
        most = self.launched + steps
        self._limit = most if self._limit is None else min(self._limit, most)

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
        if steps == 0 or self._fits_fewer_rows() or not (steps := self._allocate(steps)):
            self.closed = True
            return 0
        sender, batch = self._program.sender, self.batch
        if self._stale:
            pages = self._block_table.pages
            self._on_device = sender.batch(batch.table, pages, batch.names, batch.features)
            self._stale = False
        if self._new:
            self._begin_rows(self._on_device.numbers)
        if self.batch.grammars:
            self._on_device = sender.masked(self._on_device, self.batch.grammars)
        return steps

    def launch(self, steps: int) -> None:
        """Launch as many steps as were prepared."""
        assert self._state is not None  # prepared
        args = self._state, self._on_device, steps
        new_rows, self._replaces = self._replaces, False
        self._state, output = self._program.step(*args, new_rows=new_rows, samples=self._samples)
        self._in_order.append(LaunchedSteps(output, steps))
        self.launched, self.launches = self.launched + steps, self.launches + 1

    def oldest(self) -> LaunchedSteps | LaunchedPrefill:
        """Remove the oldest launch."""
        oldest = self._in_order.popleft()
        if isinstance(oldest, LaunchedSteps):
            self.launches -= 1
        else:
            self.prefill = None
        return oldest

    def drop(self) -> None:
        """Forget the decode steps in flight, and launch no more."""
        self._in_order = deque(one for one in self._in_order if one is self.prefill)
        self.launches, self.closed = 0, True

    def remove(self, ended: list[int]) -> list[Req]:
        """Free the rows that have ended, and the KV pages that they did not use.

        Returns:
            Their requests. Upstream's records of their KV cache are up to date.
        """
        batch = self.batch
        by_host = not batch.watched.isdisjoint(ended)
        features = batch.features
        self._write_back(np.array(ended))
        batch.remove(ended)
        # The device itself has ended the other rows.
        self._stale = self._stale or by_host or batch.features != features
        return [batch.reqs[row] for row in ended]

    def write_back(self) -> None:
        """Update upstream's records of the KV cache of all requests that have not ended."""
        if len(self.batch.active):
            self._write_back(self.batch.active)

    def _write_back(self, rows: np.ndarray) -> None:
        self._block_table.write_back(rows, self.batch.write_back(rows))

    def _fits_fewer_rows(self) -> bool:
        return self._program.bucket(len(self.batch.active)) < len(self.batch.limits)

    def _allocate(self, steps: int) -> int:
        """Allocate KV pages for the next steps. Returns for how many there are enough."""
        if self.launched + steps <= self._allocated:
            return steps
        few = max(_FEW_AHEAD, steps)
        for ahead, evict in ((_PAGES_AHEAD, False), (few, True), (_FEW_AHEAD, True), (1, True)):
            if self._limit is not None:
                ahead = min(ahead, self._limit - self.launched)
            lengths = self.batch.lengths_in(self.launched + ahead)
            changed = self._block_table.allocate(self.batch.active, lengths, evict=evict)
            if changed is not None:
                self._allocated = self.launched + ahead
                self._stale = self._stale or changed
                return min(steps, ahead)
        return 0
