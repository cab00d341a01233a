"""Admits waiting requests while decode steps are in flight.

Reaches into upstream's scheduler and its batches.

What breaks: Upstream prefills between two decode steps. All running requests then wait until the
host has read what the prefill sampled.
Why: Upstream launches a step and reads its output in one call.
Remove when: With `program.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from enginepool.engine.steady.in_flight import StepsInFlight
from enginepool.engine.steady.pace import Pace
from enginepool.engine.steady.prefill_delay import PrefillDelay
from enginepool.engine.steady.upstream_batch import drop_ended, join

if TYPE_CHECKING:
    from sgl_jax.srt.managers.schedule_batch import Req, ScheduleBatch
    from sgl_jax.srt.managers.scheduler import Scheduler

    from enginepool.engine.channel import Channel
    from enginepool.engine.scoring import Scorer
    from enginepool.engine.steady.prefill import LaunchedPrefill, Prefill

# The most steps until the next step boundary, if requests wait that the engine cannot take now.
_STEPS_WHILE_WAITING = 16


class Admission:
    """Admits requests of one engine. Used on the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        channel: Channel,
        scorer: Scorer,
        prefill: Prefill | None,
        pace: Pace,
    ) -> None:
        self._scheduler, self._channel, self._pace = scheduler, channel, pace
        self._scorer, self._prefills = scorer, prefill
        self._left = 0  # requests in the pool's queue that the engine could not take
        self._arrived = False  # more requests have come since
        self._freed = False  # a request has ended since upstream last looked for room
        self._delay = PrefillDelay()
        self._put_off = 0  # for how many steps the next prefill is put off
        self._looked_at = 0  # the step after which `look` was called last

    def begin(self) -> None:
        """Report that steps are launched next. All requests that can start have started."""
        self._left, self._freed = self._channel.queued(), False
        self._delay.restart()
        self._put_off = self._looked_at = 0

    def most_steps(self) -> int | None:
        """How many steps may run until the next step boundary. None: any number."""
        if self._in_chunks() or self._scorer.holds_kv:
            return 1  # the next piece of a prompt follows every step
        waiting = self._left or self._scheduler.waiting_queue or self._scorer.has_prompts
        return _STEPS_WHILE_WAITING if waiting else None

    def request_ended(self) -> None:
        """Report that a request has ended, so that there is more room."""
        self._freed = True

    def look(self, in_flight: StepsInFlight) -> None:
        """Read the length of the pool's queue. Decide how long the next prefill is put off."""
        channel, batch = self._channel, in_flight.batch
        queued = channel.queued()
        self._arrived = queued > self._left
        self._left = min(queued, self._left)
        running = len(batch.active)
        free = self._scheduler.max_running_requests - running
        self._delay.ran(batch.steps - self._looked_at, free=free)
        self._looked_at = batch.steps
        self._put_off = 0
        if not batch.streamed:  # the caller of a stream waits for its first token
            self._put_off = self._delay.left(
                waiting=channel.queue.share() + len(self._scheduler.waiting_queue),
                free=free,
                running=running,
                length=self._pace.length,
                ahead=in_flight.steps,
            )

    @property
    def wanted(self) -> bool:
        """Whether requests wait that may find room now."""
        if self._put_off:
            return False
        return self._arrived or (self._freed and bool(self._scheduler.waiting_queue))

    @property
    def prompt_waits(self) -> bool:
        """Whether a prompt that is to be scored waits for a step boundary and may find room."""
        scorer = self._scorer
        return scorer.has_prompts and (self._freed or not scorer.waits_for_room)

    @property
    def without_delay(self) -> int:
        """How many steps a launch may have without making a request or a prompt wait longer."""
        if self._scorer.has_prompts:
            return 1
        if self._put_off:
            return self._put_off
        waits = self._scheduler.waiting_queue or len(self._channel.queue)
        return 1 if waits else self._channel.max_decode_steps

    def admit(
        self, in_flight: StepsInFlight, launch_next: Callable[[StepsInFlight], object]
    ) -> bool:
        """Launch a prefill of the requests that wait, which join the steps in flight.

        Args:
            launch_next: Launches the next decode step. It is called when the prefill is launched.

        Returns:
            False if a request needs a step boundary.
        """
        scheduler, channel = self._scheduler, self._channel
        if not in_flight.room:
            return False
        channel.pull(at_most=in_flight.room)
        self._left = channel.queued()
        if self._left:
            in_flight.end_within(_STEPS_WHILE_WAITING)
        waiting = scheduler.waiting_queue
        if not waiting:
            return True
        running = scheduler.running_batch
        drop_ended(running)
        fit = self._fit_one_prefill(waiting)
        if running.is_empty() or len(waiting) > in_flight.room or not fit:
            return False
        if fit < len(waiting) and in_flight.batch.streamed:
            return False  # at a step boundary both prefills run without a decode step between them
        # The others come with the next prefill: they are not cut into chunks.
        others, waiting[fit:] = waiting[fit:], []
        batch = scheduler.get_new_batch_prefill()
        scheduler.waiting_queue += others
        if batch is None:
            # The KV cache is full, perhaps with pages that were allocated ahead. Upstream would
            # not look again before a request has ended.
            running.reqs_info[0].batch_is_full = False
            return False
        self._delay.restart()
        self._channel.steps += 1
        # There may be room for the others, or for a prompt: try again after a step.
        self._freed = bool(scheduler.waiting_queue) or self._scorer.has_prompts
        assert self._prefills is not None
        with self._current(batch):
            in_flight.add_prefill(self._prefills.begin(batch))
        launch_next(in_flight)
        return not self._in_chunks()

    def read(self, in_flight: StepsInFlight, prefill: LaunchedPrefill) -> None:
        """Wait for a prefill. Its requests get their first tokens."""
        assert self._prefills is not None
        scheduler, batch = self._scheduler, prefill.batch
        result = self._prefills.read(prefill)
        with self._current(batch):
            self._channel.between_steps(lambda: scheduler.process_batch_result(batch, result))
        in_flight.take_first_ids(prefill)
        chunked, all_reqs = self._in_chunks(), batch.reqs_info[0].reqs
        reqs = [req for req in all_reqs if not req.finished() and req not in chunked]
        join(scheduler.running_batch, reqs)
        joining = [req for _, req in prefill.joining]
        if others := [req for req in reqs if req not in joining]:
            in_flight.add_requests(others)

    @contextmanager
    def _current(self, batch: ScheduleBatch) -> Iterator[None]:
        """Let upstream's scheduler run this batch."""
        decoding, self._scheduler.cur_batch = self._scheduler.cur_batch, batch
        yield
        self._scheduler.cur_batch = decoding

    def _fit_one_prefill(self, reqs: Sequence[Req]) -> int:
        """How many of these prompts one prefill can compute. Upstream counts whole pages."""
        args, page = self._scheduler.server_args, self._scheduler.page_size
        limits = [args.max_prefill_tokens, args.chunked_prefill_size]
        lengths = (len(req.origin_input_ids) + len(req.output_ids) for req in reqs)
        ends = np.cumsum([-(-length // page) * page for length in lengths])
        return int((ends <= min(limit for limit in limits if limit and limit > 0)).sum())

    def _in_chunks(self) -> list[Req]:
        """The request that is prefilled in chunks, if there is one."""
        return [req for req in self._scheduler.chunked_reqs if req is not None]
