"""Which decode steps are flown, who joins a flight, and what flights share with upstream's steps.

Reaches into upstream's scheduler and its batches.

What breaks: Upstream's scheduler runs one step at a time, and whoever is to be prefilled makes all
others wait until the host has looked at what was sampled.
Why: Between two steps anything may have changed.
Remove when: With `program.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sgl_jax.srt.mem_cache.common import release_kv_cache

import patches
from enginepool.engine.steady import rows as booking
from enginepool.engine.steady.batch import Batch, Sampled, State
from enginepool.engine.steady.flight import Flight
from enginepool.engine.steady.pace import Pace
from enginepool.engine.steady.pages import Pages
from enginepool.engine.steady.program import StepProgram, supported
from enginepool.engine.steady.rows import Rows

if TYPE_CHECKING:
    from enginepool.dispatch.request import Request
    from enginepool.engine.channel import Channel

# Steps after which a flight lands while requests wait that could not start when it took off.
_STEPS_WHILE_WAITING = 16


class SteadyDecode:
    """The flights of one engine; on its thread."""

    def __init__(self, scheduler: Any, channel: Channel) -> None:
        self._scheduler, self._channel = scheduler, channel
        able = patches.optimising() and supported(scheduler)
        self._program = StepProgram(scheduler, channel.max_decode_steps) if able else None
        self._queued = 0  # requests in the pool's queue that were left there
        self._freed = False  # a request has ended since upstream last looked for room
        self._letting_in: Flight | None = None
        self._pace = Pace(channel.max_decode_steps)

    def compile_ahead(self) -> None:
        """Compile every program that a flight may run, on any thread, while upstream's own run."""
        if self._program is not None:
            self._program.compile_ahead(Pages.width(self._scheduler))

    def compile(self) -> None:
        """Run each of them once, so that a flight compiles nothing."""
        if self._program is not None:
            self._program.compile(Pages.width(self._scheduler))

    @property
    def able(self) -> bool:
        """Whether no decode step is upstream's own."""
        return self._program is not None

    def run(self, batch: Any) -> bool:
        """Fly a batch that is prepared for a decode step, and what comes after it; False if the
        step is upstream's own."""
        if not batch.forward_mode.is_decode():
            return False
        if self._program is None:
            self._channel.fallback_steps += 1
            return False
        self._fly(batch, self._program)
        return True

    def before_waiting(self) -> None:
        """Upstream's own step is dispatched and is waited for next: if it is for requests that join
        a flight, the flight's next step goes behind it."""
        if self._letting_in is not None:
            self._letting_in.dispatch()

    def _fly(self, batch: Any, program: StepProgram) -> None:
        scheduler, channel = self._scheduler, self._channel
        reqs = batch.reqs_info[0].reqs
        size = program.bucket(len(reqs))
        rows, pages = Rows(size, self._asking), Pages(scheduler, size)
        flight = Flight(self, program, rows, pages)
        self._queued, self._freed = channel.queued(), False
        with channel.single_stepping.steps_in_flight():
            flight.take_off(reqs, self._most_steps())
        self._filter(batch)
        booking.settle(batch)
        scheduler.forward_ct += rows.steps
        scheduler.new_token_ratio = max(
            scheduler.new_token_ratio - (rows.steps - 1) * scheduler.new_token_ratio_decay,
            scheduler.min_new_token_ratio,
        )

    def _most_steps(self) -> int | None:
        """After which the flight lands in any case."""
        scheduler, scorer = self._scheduler, self._scheduler.scorer
        if self._in_chunks() or scorer.holds_kv:
            return 1  # the next piece of a prompt comes between any two
        waiting = self._queued or scheduler.waiting_queue or scorer.has_prompts
        return _STEPS_WHILE_WAITING if waiting else None

    # What a flight asks for

    @property
    def one_by_one(self) -> bool:
        return self._channel.single_stepping.on

    def steps_at_once(self, *, idle: bool | None, streamed: bool) -> int:
        if idle is not None and self._letting_in is None:
            self._pace.dispatched(idle=idle)
        if self.one_by_one:
            return 1
        scheduler = self._scheduler
        waits = self._letting_in or scheduler.waiting_queue or len(self._channel.queue)
        return self._pace.steps(calm=not (streamed or waits or scheduler.scorer.has_prompts))

    def step_took(self, seconds: float) -> None:
        self._pace.took(seconds)

    def dispatch(self, state: State, batch: Batch, steps: int) -> tuple[State, Sampled]:
        assert self._program is not None
        return self._program.step(state, batch, steps)

    def steps_begin(self, steps: int) -> None:
        self._channel.steps += steps
        self._channel.steady_dispatches += 1

    def wait_for_device(self, result: Any) -> None:
        self._scheduler.wait_for_device(result)

    def take_over(self, give: Callable[[], list[int]], steps: int) -> list[int]:
        ended = self._channel.between_steps(give)
        self._channel.steady_steps += steps
        return ended

    def release(self, req: Any) -> None:
        self._pace.ended(len(req.output_ids))
        release_kv_cache(req, self._scheduler.tree_cache)
        self._freed = True

    def hand_over(self, reqs: list[Any]) -> None:
        self._scheduler.stream_output(reqs)

    def wants_boundary(self, flight: Flight) -> bool:
        channel = self._channel
        channel.single_stepping.in_flight(flight.on_their_way)
        if channel.has_jobs():
            return True
        queued = channel.queued()
        more = queued > self._queued or (self._freed and bool(self._scheduler.waiting_queue))
        self._queued = min(queued, self._queued)
        return (more and not self._let_in(flight)) or self._may_score()

    def _may_score(self) -> bool:
        """Whether prompts wait for a step boundary, where they are scored, and may find room."""
        scorer = self._scheduler.scorer
        return scorer.has_prompts and (self._freed or not scorer.waits_for_room)

    def _let_in(self, flight: Flight) -> bool:
        """Prefill who waits, behind a step that is on its way, and let them join; False if that
        needs a step boundary."""
        scheduler, channel = self._scheduler, self._channel
        if not flight.room:
            return False
        channel.pull(at_most=flight.room)
        self._queued = channel.queued()
        waiting = scheduler.waiting_queue
        if not waiting:
            return True
        running = scheduler.running_batch
        self._filter(running)
        if running.is_empty() or len(waiting) > flight.room or not self._may_join(waiting):
            return False
        batch = scheduler.get_new_batch_prefill()
        if batch is None:
            # For want of KV cache, of which the flight may have taken some ahead. Upstream would
            # not look again before a request has ended.
            running.reqs_info[0].batch_is_full = False
            return False
        self._prefill(batch, flight)
        in_chunks = self._in_chunks()
        batch.filter_batch(chunked_req_to_exclude=in_chunks)
        if not batch.is_empty():
            reqs = list(batch.reqs_info[0].reqs)
            running.merge_batch(batch)
            flight.join(reqs)
        return not in_chunks

    def _prefill(self, batch: Any, flight: Flight) -> None:
        scheduler = self._scheduler
        flown, scheduler.cur_batch = scheduler.cur_batch, batch
        self._channel.steps += 1
        self._letting_in = flight
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
