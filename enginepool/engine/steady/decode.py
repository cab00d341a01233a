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
from enginepool.engine.device_wait import DeviceWait
from enginepool.engine.steady import rows as booking
from enginepool.engine.steady.admission import Admission, drop_ended
from enginepool.engine.steady.in_flight import StepsInFlight
from enginepool.engine.steady.pace import Pace
from enginepool.engine.steady.pages import Pages
from enginepool.engine.steady.program import StepProgram, supported
from enginepool.engine.steady.rows import Rows

if TYPE_CHECKING:
    import jax

    from enginepool.dispatch.request import Request
    from enginepool.engine.channel import Channel
    from enginepool.engine.scoring import Scorer

# Launches in flight at a time: one that runs, one that waits behind it.
_LAUNCHES = 2


class SteadyDecode:
    """The flights of one engine; on its thread."""

    def __init__(
        self, scheduler: Any, channel: Channel, scorer: Scorer, device_wait: DeviceWait
    ) -> None:
        self._scheduler, self._channel = scheduler, channel
        self._device_wait = device_wait
        able = patches.optimising() and supported(scheduler)
        self.program = StepProgram(scheduler, channel.max_decode_steps) if able else None
        self.admission = Admission(scheduler, channel, scorer, device_wait)
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

    def _run(self, batch: Any, program: StepProgram) -> None:
        scheduler, channel = self._scheduler, self._channel
        reqs = batch.reqs_info[0].reqs
        size = program.bucket(len(reqs))
        self.admission.begin()
        self._booked_at = None
        rows, pages = Rows(size, self._asking), Pages(scheduler, size)
        with channel.single_stepping.steps_in_flight():
            self._run_steps(StepsInFlight(program, rows, pages, reqs, self.admission.most_steps()))
        drop_ended(batch)
        booking.settle(batch)
        scheduler.forward_ct += rows.steps
        scheduler.new_token_ratio = max(
            scheduler.new_token_ratio - (rows.steps - 1) * scheduler.new_token_ratio_decay,
            scheduler.min_new_token_ratio,
        )

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
                if not in_flight.closed:
                    self._look_who_waits(in_flight)
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

    def _launch_behind_prefill(self, in_flight: StepsInFlight) -> None:
        self._launch(in_flight, behind_prefill=True)

    def _launch(self, in_flight: StepsInFlight, *, behind_prefill: bool = False) -> bool:
        """Launch what comes next, if there is something; returns whether it did."""
        most = in_flight.most_next
        if most <= 0:
            return False
        steps = in_flight.prepare(min(most, self._steps_at_once(in_flight, behind_prefill)))
        if steps == 0:
            return False
        # The first step of all began at the step boundary.
        self._channel.steps += steps if in_flight.launched else steps - 1
        self._channel.steady_dispatches += 1
        in_flight.launch(steps)
        return True

    def _steps_at_once(self, in_flight: StepsInFlight, behind_prefill: bool) -> int:
        idle = in_flight.idle
        if idle is not None and not behind_prefill:
            self._pace.dispatched(idle=idle)
        if self._channel.single_stepping.on:
            return 1
        others = behind_prefill or in_flight.rows.streamed
        return self._pace.steps(calm=not others and self.admission.calm)

    # Booking

    def _book_oldest(self, in_flight: StepsInFlight) -> None:
        """Wait for the oldest launch, and give the requests their tokens."""
        rows, (sampled, steps) = in_flight.rows, in_flight.oldest()
        self._device_wait.until_ready(sampled.ids)
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
        self.admission.request_ended()

    # Between two launches

    def _look_who_waits(self, in_flight: StepsInFlight) -> None:
        """Admit requests that wait. Launch no more if a step boundary is needed."""
        admission = self.admission
        self._channel.single_stepping.in_flight(in_flight.steps)
        admission.look()
        if (
            self._channel.has_jobs()
            or (admission.wanted and not admission.admit(in_flight, self._launch_behind_prefill))
            or admission.prompt_waits
        ):
            in_flight.closed = True

    def _asking(self, req: Any) -> Request | None:
        """The pool's request, if it wants the most probable ids or names some."""
        request = self._channel.running.held.get(req.rid)
        wants = request is not None and (request.top_logprobs_num or request.named_ids)
        return request if wants else None


def _numbers(array: jax.Array, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """By step: ids, and the values that their bits are."""
    numbers = np.asarray(array)[:steps]
    return numbers[:, 0], numbers[:, 1].view(np.float32)
