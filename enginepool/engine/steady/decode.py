"""Which decode steps are flown, who joins a flight, and what flights share with upstream's steps.

Reaches into upstream's scheduler and its batches.

What breaks: Upstream's scheduler runs one step at a time, and whoever is to be prefilled makes all
others wait until the host has looked at what was sampled.
Why: Between two steps anything may have changed.
Remove when: With `program.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from sgl_jax.srt.mem_cache.common import release_kv_cache

import patches
from enginepool.engine.steady import rows as booking
from enginepool.engine.steady.in_flight import StepsInFlight
from enginepool.engine.steady.pace import Pace
from enginepool.engine.steady.pages import Pages
from enginepool.engine.steady.program import StepProgram, supported
from enginepool.engine.steady.rows import Rows

if TYPE_CHECKING:
    import jax

    from enginepool.dispatch.request import Request
    from enginepool.engine.channel import Channel

# Launches in flight at a time: one that runs, one that waits behind it.
_LAUNCHES = 2
# Steps after which a flight lands while requests wait that could not start when it took off.
_STEPS_WHILE_WAITING = 16


class SteadyDecode:
    """The flights of one engine; on its thread."""

    def __init__(self, scheduler: Any, channel: Channel) -> None:
        self._scheduler, self._channel = scheduler, channel
        able = patches.optimising() and supported(scheduler)
        self.program = StepProgram(scheduler, channel.max_decode_steps) if able else None
        self._queued = 0  # requests in the pool's queue that were left there
        self._freed = False  # a request has ended since upstream last looked for room
        self._letting_in: StepsInFlight | None = None
        self._pace = Pace(channel.max_decode_steps)
        self._booked_at: float | None = None  # when the launch before was, in this run

    def compile_ahead(self) -> None:
        """Compile every program that a flight may run, on any thread, while upstream's own run."""
        if self.program is not None:
            self.program.compile_ahead(Pages.width(self._scheduler))

    def compile(self) -> None:
        """Run each of them once, so that a flight compiles nothing."""
        if self.program is not None:
            self.program.compile(Pages.width(self._scheduler))

    @property
    def able(self) -> bool:
        """Whether no decode step is upstream's own."""
        return self.program is not None

    def run(self, batch: Any) -> bool:
        """Fly a batch that is prepared for a decode step, and what comes after it; False if the
        step is upstream's own."""
        if not batch.forward_mode.is_decode():
            return False
        if self.program is None:
            self._channel.fallback_steps += 1
            return False
        self._run(batch, self.program)
        return True

    def before_waiting(self) -> None:
        """Upstream's own step is dispatched and is waited for next: if it is for requests that join
        a flight, the flight's next step goes behind it."""
        if self._letting_in is not None:
            self._launch(self._letting_in)

    def _run(self, batch: Any, program: StepProgram) -> None:
        scheduler, channel = self._scheduler, self._channel
        reqs = batch.reqs_info[0].reqs
        size = program.bucket(len(reqs))
        self._queued, self._freed = channel.queued(), False
        self._booked_at = None
        rows, pages = Rows(size, self._asking), Pages(scheduler, size)
        with channel.single_stepping.steps_in_flight():
            self._run_steps(StepsInFlight(program, rows, pages, reqs, self._limit()))
        self._filter(batch)
        booking.settle(batch)
        scheduler.forward_ct += rows.steps
        scheduler.new_token_ratio = max(
            scheduler.new_token_ratio - (rows.steps - 1) * scheduler.new_token_ratio_decay,
            scheduler.min_new_token_ratio,
        )

    def _limit(self) -> int | None:
        """How many steps are run at most."""
        scheduler, scorer = self._scheduler, self._scheduler.scorer
        if self._in_chunks() or scorer.holds_kv:
            return 1  # the next piece of a prompt comes between any two
        waiting = self._queued or scheduler.waiting_queue or scorer.has_prompts
        return _STEPS_WHILE_WAITING if waiting else None

    def _run_steps(self, in_flight: StepsInFlight) -> None:
        """Launch steps and book them until something needs a step boundary. That is one step at
        least: upstream has allocated what it needs.

        Raises:
            Exception: A step failed, or the requests were taken away. Tokens that were fetched are
                in upstream's requests; nothing else there is in order.
        """
        with self._booking_what_is_launched(in_flight):
            self._launch_ahead(in_flight)
        while in_flight.launches and len(in_flight.rows.seated):
            self._book_oldest(in_flight)
            with self._booking_what_is_launched(in_flight):
                if not in_flight.closed and self.wants_boundary(in_flight):
                    in_flight.closed = True
                self._launch_ahead(in_flight)
        in_flight.settle()

    @contextmanager
    def _booking_what_is_launched(self, in_flight: StepsInFlight) -> Iterator[None]:
        """An error does not concern the steps before it: their tokens are booked first."""
        try:
            yield
        except BaseException:
            while in_flight.launches:
                self._book_oldest(in_flight)
            raise

    # Launching

    def _launch_ahead(self, in_flight: StepsInFlight) -> None:
        most = 1 if self._channel.single_stepping.on else _LAUNCHES
        while in_flight.launches < most and self._launch(in_flight):
            pass

    def _launch(self, in_flight: StepsInFlight) -> bool:
        """Launch what comes next, if there is something; returns whether it did."""
        most = in_flight.most_next
        if most <= 0:
            return False
        steps = in_flight.prepare(min(most, self._steps_at_once(in_flight)))
        if steps == 0:
            return False
        # The first step of all began at the step boundary.
        self._channel.steps += steps if in_flight.launched else steps - 1
        self._channel.steady_dispatches += 1
        in_flight.launch(steps)
        return True

    def _steps_at_once(self, in_flight: StepsInFlight) -> int:
        idle = in_flight.idle
        if idle is not None and self._letting_in is None:
            self._pace.dispatched(idle=idle)
        if self._channel.single_stepping.on:
            return 1
        scheduler = self._scheduler
        waits = self._letting_in or scheduler.waiting_queue or len(self._channel.queue)
        streamed = in_flight.rows.streamed
        return self._pace.steps(calm=not (streamed or waits or scheduler.scorer.has_prompts))

    # Booking

    def _book_oldest(self, in_flight: StepsInFlight) -> None:
        """Wait for the oldest launch, and give the requests their tokens."""
        rows, (sampled, steps) = in_flight.rows, in_flight.oldest()
        self._scheduler.wait_for_device(sampled.ids)
        now = time.perf_counter()
        if self._booked_at is not None:
            self._pace.took((now - self._booked_at) / steps)
        self._booked_at = now
        ids, logprobs = _numbers(sampled.ids, steps)
        form = rows.form
        top = _numbers(sampled.top, steps) if form.top else None
        named = np.asarray(sampled.named)[:steps] if form.named else None
        ended = self.book(lambda: rows.book(ids, logprobs, top, named), steps)
        live = rows.live
        if ended:
            for req in in_flight.remove(ended):
                self._release(req)
        if rows.broken:
            # What was sampled after this is of no use.
            in_flight.drop()
            self._scheduler.stream_output([rows.reqs[row] for row in live])
        elif news := [*ended, *sorted(rows.streamed.intersection(live.tolist()))]:
            self._scheduler.stream_output([rows.reqs[row] for row in news])

    def book(self, give: Callable[[], list[int]], steps: int) -> list[int]:
        """Give requests the tokens of so many steps, while nobody takes the requests away.

        Raises:
            StepTimeout: They were taken away.
        """
        ended = self._channel.between_steps(give)
        self._channel.steady_steps += steps
        return ended

    def _release(self, req: Any) -> None:
        """A request has ended: what it held of the KV cache is the prefix cache's."""
        self._pace.ended(len(req.output_ids))
        release_kv_cache(req, self._scheduler.tree_cache)
        self._freed = True

    # Step boundaries, and requests that join

    def wants_boundary(self, in_flight: StepsInFlight) -> bool:
        """Whether something waits for a step boundary. Requests may join instead."""
        channel = self._channel
        channel.single_stepping.in_flight(in_flight.steps)
        if channel.has_jobs():
            return True
        queued = channel.queued()
        more = queued > self._queued or (self._freed and bool(self._scheduler.waiting_queue))
        self._queued = min(queued, self._queued)
        return (more and not self._let_in(in_flight)) or self._may_score()

    def _may_score(self) -> bool:
        """Whether prompts wait for a step boundary, where they are scored, and may find room."""
        scorer = self._scheduler.scorer
        return scorer.has_prompts and (self._freed or not scorer.waits_for_room)

    def _let_in(self, in_flight: StepsInFlight) -> bool:
        """Prefill who waits, behind a step that is on its way, and let them join; False if that
        needs a step boundary."""
        scheduler, channel = self._scheduler, self._channel
        if not in_flight.room:
            return False
        channel.pull(at_most=in_flight.room)
        self._queued = channel.queued()
        waiting = scheduler.waiting_queue
        if not waiting:
            return True
        running = scheduler.running_batch
        self._filter(running)
        if running.is_empty() or len(waiting) > in_flight.room or not self._may_join(waiting):
            return False
        batch = scheduler.get_new_batch_prefill()
        if batch is None:
            # For want of KV cache, of which the flight may have taken some ahead. Upstream would
            # not look again before a request has ended.
            running.reqs_info[0].batch_is_full = False
            return False
        self._prefill(batch, in_flight)
        in_chunks = self._in_chunks()
        batch.filter_batch(chunked_req_to_exclude=in_chunks)
        if not batch.is_empty():
            reqs = list(batch.reqs_info[0].reqs)
            running.merge_batch(batch)
            in_flight.join(reqs)
        return not in_chunks

    def _prefill(self, batch: Any, in_flight: StepsInFlight) -> None:
        scheduler = self._scheduler
        flown, scheduler.cur_batch = scheduler.cur_batch, batch
        self._channel.steps += 1
        self._letting_in = in_flight
        try:
            result = scheduler.run_batch(batch)
        finally:
            self._letting_in = None
        scheduler.process_batch_result(batch, result)
        scheduler.cur_batch = flown
        self._freed = bool(scheduler.waiting_queue)  # what is left is tried again after a step

    def _filter(self, batch: Any) -> None:
        """Requests that have ended leave upstream's batch, so that others find room in it."""
        before = batch.batch_size()
        batch.filter_batch()
        if batch.batch_size() < before:
            batch.reqs_info[0].batch_is_full = False

    def _may_join(self, reqs: list[Any]) -> bool:
        """Whether these are prefilled in one step, as a whole; upstream charges whole pages."""
        args, page = self._scheduler.server_args, self._scheduler.page_size
        lengths = (len(req.origin_input_ids) + len(req.output_ids) for req in reqs)
        tokens = sum(-(-length // page) * page for length in lengths)
        limits = [args.max_prefill_tokens, args.chunked_prefill_size]
        return tokens <= min(limit for limit in limits if limit and limit > 0)

    def _in_chunks(self) -> dict[int, Any]:
        """Who is prefilled in part, and upstream's to go on with; by its rank, as upstream asks."""
        chunked = self._scheduler.chunked_reqs
        return {rank: req for rank, req in enumerate(chunked) if req is not None}

    def _asking(self, req: Any) -> Request | None:
        """The pool's request, if it wants the most probable ids or names some."""
        request = self._channel.running.held.get(req.rid)
        wants = request is not None and (request.top_logprobs_num or request.named_ids)
        return request if wants else None


def _numbers(array: jax.Array, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """By step: ids, and the values that their bits are."""
    numbers = np.asarray(array)[:steps]
    return numbers[:, 0], numbers[:, 1].view(np.float32)
