"""Runs decode steps that stay on the device, until something needs a step boundary.

Reaches into upstream's scheduler and its batches.

What breaks: Upstream's scheduler launches a step only when the host has read the last one's tokens.
Why: Anything may have changed between two steps.
Remove when: With `program.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from sgl_jax.srt.mem_cache.common import release_kv_cache

from enginepool.engine.device_wait import DeviceWait
from enginepool.engine.steady.admission import Admission
from enginepool.engine.steady.block_table import BlockTable
from enginepool.engine.steady.extras import Extras
from enginepool.engine.steady.in_flight import LaunchedSteps, StepsInFlight
from enginepool.engine.steady.input_batch import InputBatch
from enginepool.engine.steady.pace import Pace
from enginepool.engine.steady.prefill import Prefill
from enginepool.engine.steady.upstream_batch import drop_ended, write_back_batch

if TYPE_CHECKING:
    import jax
    from sgl_jax.srt.managers.schedule_batch import Req, ScheduleBatch
    from sgl_jax.srt.managers.scheduler import Scheduler

    from enginepool.dispatch.request import Request
    from enginepool.engine.channel import Channel
    from enginepool.engine.scoring import Scorer
    from enginepool.engine.steady.program import StepProgram

# How many launches are in flight: one runs, and one waits behind it.
_LAUNCHES = 2


class SteadyDecode:
    """The decode steps of one engine. Used on the engine's thread.

    Attributes:
        program: The step program. None if upstream runs all steps.
        prefill: Runs prefills. None if upstream runs all steps.
        admission: Admits requests to the steps in flight.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        channel: Channel,
        scorer: Scorer,
        device_wait: DeviceWait,
        program: StepProgram | None,
        prefill: Prefill | None,
    ) -> None:
        self._scheduler, self._channel = scheduler, channel
        self._device_wait = device_wait
        self.program, self.prefill = program, prefill
        self._pace = Pace(channel.max_decode_steps)
        self.admission = Admission(scheduler, channel, scorer, prefill, self._pace)
        self._read_at: float | None = None  # when the last output was read, in this run

    def ahead(self) -> list[Callable[[], None]]:
        """Jobs that compile the step program for each bucket. They may run on any threads, while
        upstream's own programs run."""
        if self.program is None:
            return []
        return [self.program.ahead(rows) for rows in self.program.buckets]

    def compile(self) -> None:
        """Run the step program once for each bucket. Later steps compile nothing."""
        if self.program is not None:
            self.program.compile()

    @property
    def supported(self) -> bool:
        """Whether the step program runs all decode steps. Otherwise upstream runs them."""
        return self.program is not None

    def run(self, batch: ScheduleBatch) -> bool:
        """Run the decode step that upstream has prepared, and those after it.

        Returns:
            False if upstream is to run the step itself.
        """
        if not batch.forward_mode.is_decode():
            return False
        if self.program is None:
            self._channel.fallback_steps += 1
            return False
        self._run(batch, self.program)
        return True

    def _run(self, upstream_batch: ScheduleBatch, program: StepProgram) -> None:
        scheduler, channel = self._scheduler, self._channel
        reqs = upstream_batch.reqs_info[0].reqs
        size = program.bucket(len(reqs))
        self.admission.begin()
        self._read_at = None
        vocab_size = scheduler.model_config.vocab_size
        batch = InputBatch(size, vocab_size, self._with_extras, self._adapter_row)
        block_table = BlockTable(scheduler, size)
        limit = self.admission.most_steps()
        with channel.single_stepping.steps_in_flight():
            self._run_steps(StepsInFlight(program, batch, block_table, reqs, limit))
        drop_ended(upstream_batch)
        write_back_batch(upstream_batch)
        # Count these steps as upstream counts its own. Upstream has already lowered the ratio for
        # the first step.
        scheduler.forward_ct += batch.steps
        scheduler.new_token_ratio = max(
            scheduler.new_token_ratio - (batch.steps - 1) * scheduler.new_token_ratio_decay,
            scheduler.min_new_token_ratio,
        )

    def _run_steps(self, in_flight: StepsInFlight) -> None:
        """Launch steps and read their tokens, until something needs a step boundary.

        At least one step runs, because upstream has allocated its KV cache.

        Raises:
            Exception: A step failed, or the requests were taken away. Upstream's requests have all
                tokens that were read. The rest of upstream's state is undefined.
        """
        with self._reading_before_raising(in_flight):
            self._launch_ahead(in_flight)
        while in_flight.any_left:
            self._read_oldest(in_flight)
            with self._reading_before_raising(in_flight):
                if not in_flight.closed:
                    self._admit_waiting(in_flight)
                self._launch_ahead(in_flight)
        in_flight.write_back()

    @contextmanager
    def _reading_before_raising(self, in_flight: StepsInFlight) -> Iterator[None]:
        """After an error, first read the tokens of the steps in flight. They are valid."""
        try:
            yield
        except BaseException:
            while in_flight.any_left:
                self._read_oldest(in_flight)
            raise

    # Launching

    def _launch_ahead(self, in_flight: StepsInFlight) -> None:
        most = 1 if self._channel.single_stepping.on else _LAUNCHES
        while in_flight.launches < most and self._launch(in_flight):
            pass

    def _launch_behind_prefill(self, in_flight: StepsInFlight) -> None:
        self._launch(in_flight, behind_prefill=True)

    def _launch(self, in_flight: StepsInFlight, *, behind_prefill: bool = False) -> bool:
        """Launch the next steps, if there are any. Returns whether there were."""
        most = in_flight.most_next
        if most <= 0:
            return False
        if self._channel.single_stepping.on and in_flight.prefill is not None:
            return False  # the engine may stop when the prefill has ended
        steps = in_flight.prepare(min(most, self._steps_at_once(in_flight, behind_prefill)))
        if steps == 0:
            return False
        # The channel has counted the first step of the run.
        self._channel.steps += steps if in_flight.launched else steps - 1
        self._channel.steady_dispatches += 1
        in_flight.launch(steps)
        return True

    def _steps_at_once(self, in_flight: StepsInFlight, behind_prefill: bool) -> int:
        if self._channel.single_stepping.on:
            return 1
        idle, grammars = in_flight.idle, in_flight.batch.grammars
        # With a grammar the device waits for the mask, whatever the pace is.
        if idle is not None and not behind_prefill and not grammars:
            self._pace.launched(idle=idle)
        busy = behind_prefill or in_flight.batch.streamed
        return self._pace.steps(without_delay=1 if busy else self.admission.without_delay)

    # Reading

    def _read_oldest(self, in_flight: StepsInFlight) -> None:
        """Wait for the oldest launch. Requests get their tokens."""
        oldest = in_flight.oldest()
        if isinstance(oldest, LaunchedSteps):
            self._read_steps(in_flight, oldest)
        else:
            self.admission.read(in_flight, oldest)
            self._read_at = time.perf_counter()

    def _read_steps(self, in_flight: StepsInFlight, launched: LaunchedSteps) -> None:
        batch, (output, steps) = in_flight.batch, launched
        self._device_wait.until_ready(output.ids)
        now = time.perf_counter()
        if self._read_at is not None:
            self._pace.took((now - self._read_at) / steps)
        self._read_at = now
        ids, logprobs = _ids_and_logprobs(output.ids, steps)
        features = batch.features
        extras = Extras(
            _ids_and_logprobs(output.top, steps) if features.top else None,
            np.asarray(output.named)[:steps] if features.named else None,
            np.asarray(output.kept)[:steps] if features.kept else None,
            None if output.experts is None else np.asarray(output.experts)[:steps],
        )
        ended = self.append(lambda: batch.append_tokens(ids, logprobs, extras), steps)
        latest = batch.latest
        if ended:
            for req in in_flight.remove(ended):
                self._release(req)
        if batch.not_finite:
            # Later steps in flight have computed with these numbers.
            in_flight.drop()
            self._hand_over([batch.reqs[row] for row in latest])
        elif news := [*ended, *sorted(batch.streamed.intersection(latest.tolist()))]:
            self._hand_over([batch.reqs[row] for row in news])

    def append(self, append_tokens: Callable[[], list[int]], steps: int) -> list[int]:
        """Append the tokens of these steps. Nobody can take the requests away meanwhile.

        Raises:
            StepTimeout: The requests were taken away before.
        """
        ended = self._channel.between_steps(append_tokens)
        self._channel.steady_steps += steps
        return ended

    def _hand_over(self, reqs: list[Req]) -> None:
        """Publish and deliver the new tokens of these requests."""
        self._scheduler.stream_output(reqs, return_logprob=False, return_output_logprob_only=True)

    def _release(self, req: Req) -> None:
        """Give the KV cache of a request that has ended to the prefix cache."""
        self._pace.ended(len(req.output_ids))
        release_kv_cache(req, self._scheduler.tree_cache)
        self.admission.request_ended()

    # Between two launches

    def _admit_waiting(self, in_flight: StepsInFlight) -> None:
        """Admit requests that wait. Launch no more if something needs a step boundary."""
        channel, admission = self._channel, self.admission
        channel.single_stepping.in_flight(in_flight.steps)
        admission.look(in_flight)
        may_admit = in_flight.prefill is None and admission.wanted
        if (
            channel.has_jobs()
            or (may_admit and not admission.admit(in_flight, self._launch_behind_prefill))
            or admission.prompt_waits
        ):
            in_flight.closed = True

    def _with_extras(self, req: Req) -> Request | None:
        """The pool's request, if it gets more values per token than id and log-probability. In an
        engine that returns experts every request does, even before its prefill is read."""
        assert self.program is not None
        request = self._channel.running.held.get(req.rid)
        if request is None or not (self.program.with_experts or request.wants_more):
            return None
        return request

    def _adapter_row(self, req: Req) -> tuple[int, float]:
        assert self.program is not None
        request = self._channel.running.held.get(req.rid)
        return self.program.adapter_row(None if request is None else request.adapter)


def _ids_and_logprobs(array: jax.Array, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """By step: ids, and log-probabilities, which arrive as bits."""
    numbers = np.asarray(array)[:steps]
    return numbers[:, 0], numbers[:, 1].view(np.float32)
