"""Which decode steps are flown, and what flights share with upstream's own steps.

Reaches into upstream's scheduler and its compilation manager.

What breaks, why and until when: as for `program.py`, whose host this is. Programs are compiled
for upstream's batch buckets, from its own dummy batches.
What breaks: Without this a program has no batch to run.
Why: Batches are made by upstream's scheduler alone.
Remove when: With `program.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from sgl_jax.srt.mem_cache.common import release_kv_cache
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode

import patches
from enginepool.engine.steady.flight import Flight
from enginepool.engine.steady.pages import Pages
from enginepool.engine.steady.program import StepProgram, supported
from enginepool.engine.steady.rows import Rows, flies

if TYPE_CHECKING:
    from enginepool.engine.channel import Channel

# Steps after which a flight lands while requests wait that could not start when it took off.
_STEPS_WHILE_WAITING = 16


class SteadyDecode:
    """The flights of one engine; on its thread.

    Attributes:
        flown: How many decode steps were flown.
        fallen_back: How many were upstream's own.
    """

    def __init__(self, scheduler: Any, channel: Channel) -> None:
        self._scheduler, self._channel = scheduler, channel
        self._queued = 0
        self._freed = False
        self.flown = self.fallen_back = 0
        able = patches.optimising() and supported(scheduler)
        self._program = StepProgram(scheduler) if able else None

    def compile(self, make_batch: Callable[..., Any]) -> None:
        """Compile the program for every batch bucket.

        Args:
            make_batch: Upstream's maker of dummy batches, in the form that requests have.
        """
        program = self._program
        if program is None:
            return
        width = Pages.width(self._scheduler)
        for size, places in program.buckets.items():
            batch = make_batch(size, size, ForwardMode.DECODE, places, per_dp_bs_size=size)
            nothing = program.no_batch(size, width, program.place_sampling(batch))
            state, sampled = program.step(program.place(np.zeros((2, size), np.int32)), nothing)
            program.step(state, nothing)[1].block_until_ready()
            del sampled

    def run(self, batch: Any) -> bool:
        """Fly a batch that is prepared for a decode step, and what comes after it; False if the
        step is upstream's own."""
        if not batch.forward_mode.is_decode():
            return False
        taken_off = self._program is not None and self._fly(batch, self._program)
        self.fallen_back += not taken_off
        return taken_off

    def _fly(self, batch: Any, program: StepProgram) -> bool:
        scheduler = self._scheduler
        if not flies(batch) or any(req is not None for req in scheduler.chunked_reqs):
            return False
        if scheduler.wants_top_logprobs:
            return False
        info = batch.reqs_info[0]
        rows = Rows(info, program.bucket(len(info.reqs)))
        pages_of_longest = Pages.width(scheduler) * scheduler.page_size
        if rows.most_left < 2 or rows.limits[:, 0].max() > pages_of_longest:
            return False
        paddings = scheduler.tp_worker.get_precompile_paddings()
        worker_batch = batch.get_model_worker_batch(*paddings, scheduler.page_size)
        if worker_batch.sampling_info.sampling_seeds is None:
            return False
        pages = Pages(scheduler, len(rows.limits), np.asarray(info.req_pool_indices), rows.lengths)
        flight = Flight(self, program, rows, pages, program.place_sampling(worker_batch))
        self._queued, self._freed = self._channel.queued(), False
        waiting = self._queued or scheduler.waiting_queue
        taken_off = flight.take_off(info.input_ids, _STEPS_WHILE_WAITING if waiting else None)
        if taken_off:
            self._account(flight.steps)
        return taken_off

    def _account(self, steps: int) -> None:
        """What upstream's scheduler counts with each of its own steps."""
        scheduler = self._scheduler
        self.flown += steps
        scheduler.forward_ct += steps
        scheduler.new_token_ratio = max(
            scheduler.new_token_ratio - (steps - 1) * scheduler.new_token_ratio_decay,
            scheduler.min_new_token_ratio,
        )

    # What a flight asks for

    def step_begins(self) -> None:
        self._channel.steps += 1

    def wait_for_device(self, result: Any) -> None:
        self._scheduler.wait_for_device(result)

    def take_over(self, give: Callable[[], list[int]]) -> list[int]:
        return self._channel.between_steps(give)

    def wants_boundary(self) -> bool:
        self._queued = min(self._queued, self._channel.queued())
        if self._freed and self._scheduler.waiting_queue:
            return True
        return self._channel.wants_boundary(self._queued)

    def release(self, req: Any) -> None:
        release_kv_cache(req, self._scheduler.tree_cache)
        self._freed = True

    def hand_over(self, reqs: list[Any]) -> None:
        self._scheduler.stream_output(reqs)
