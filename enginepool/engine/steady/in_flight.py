"""Decode steps that are launched and whose output the host has not read.

The next step is launched before the host reads the last one's tokens. One launch is one step, or
several steps in a loop on the device.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from enginepool.engine.steady.block_table import BlockTable
from enginepool.engine.steady.device_batch import UNCHANGED, DecodeState, StepOutput
from enginepool.engine.steady.input_batch import InputBatch
from enginepool.engine.steady.penalties import entries
from enginepool.engine.steady.program import StepProgram

if TYPE_CHECKING:
    import jax
    from sgl_jax.srt.managers.schedule_batch import Req

# KV pages are allocated for _PAGES_AHEAD steps at once while some are free. Once the prefix cache
# has to evict, they are allocated for _FEW_AHEAD steps. Allocated pages count as used.
_PAGES_AHEAD, _FEW_AHEAD = 32, 4


class StepsInFlight:
    """The steps in flight of one batch, and what the device needs for the next one.

    Used on the engine's thread.

    Attributes:
        batch: Its requests, on the host.
        launched: How many steps were launched.
        closed: No further step is launched, and no request is added.
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
        self.launched = 0
        self.closed = False
        self._limit = limit
        self._outputs: deque[tuple[StepOutput, int]] = deque()
        self._allocated = 0  # how many steps every row has KV pages for
        self._stale = True  # the device has an old copy of the batch
        self._state: DecodeState | None = None
        self._new: list[int] = []  # rows of which the device's state knows nothing
        self.add_requests(reqs)

    @property
    def launches(self) -> int:
        """How many launches are in flight."""
        return len(self._outputs)

    @property
    def steps(self) -> int:
        """How many steps are in flight."""
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
        if not self._outputs:
            return True
        ids: Any = self._outputs[-1][0].ids  # JAX's types do not have `is_ready`
        return ids.is_ready()

    @property
    def most_next(self) -> int:
        """How many steps are left for the next launch. 0 or less: none may be launched now."""
        if self.closed:
            return 0
        left = self.batch.most_left - self.steps
        if self.batch.grammars:
            # A mask depends on the token before it.
            return 0 if self._outputs else min(left, 1)
        return left

    def add_requests(self, reqs: list[Req]) -> None:
        """Add requests that are prefilled. They take part from the next launch on."""
        new = self.batch.add_requests(reqs, after=self.launched)
        self._block_table.add_rows(new, reqs)
        self._allocated, self._stale = 0, True
        self._new += new

    def _seat(self, numbers: jax.Array) -> None:
        """Put the new rows into the device's state, and the tokens that they already have into
        their tallies.

        Args:
            numbers: The batch as it was sent.
        """
        program, batch = self._program, self.batch
        if self._state is None:
            self._state = program.begin(numbers)
        else:
            self._state = program.set_rows(self._state, numbers)
        if penalised := [row for row in self._new if row in batch.penalised]:
            self._state = program.tally(self._state, penalised, entries(penalised, batch.reqs))
        batch.table.origin[self._new] = UNCHANGED
        self._new = []

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
            adapters = self._program.adapters_of(batch.adapters, len(batch.limits))
            self._on_device = sender.batch(
                batch.table, pages, batch.names, batch.features, adapters
            )
            self._stale = False
        if self._new:
            self._seat(self._on_device.numbers)
        if self.batch.grammars:
            self._on_device = sender.masked(self._on_device, self.batch.grammars)
        return steps

    def launch(self, steps: int) -> None:
        """Launch as many steps as were prepared."""
        assert self._state is not None  # prepared
        self._state, output = self._program.step(self._state, self._on_device, steps)
        self._outputs.append((output, steps))
        self.launched += steps

    def oldest(self) -> tuple[StepOutput, int]:
        """Remove the oldest launch. Returns its output, and how many steps it has."""
        return self._outputs.popleft()

    def drop(self) -> None:
        """Forget the steps in flight, and launch no more."""
        self._outputs.clear()
        self.closed = True

    def remove(self, ended: list[int]) -> list[Req]:
        """Free the rows that have ended, and the KV pages that they did not use.

        Returns:
            Their requests. Upstream knows the KV cache of each.
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
        """Tell upstream the KV cache of all requests that have not ended."""
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
