"""The channel is the only way into an engine. For upstream it is the communication backend.

Upstream's loop calls `recv_requests` at the top of every iteration, on the engine's own thread.
That call is the step boundary: jobs run there, new requests enter there, and the thread sleeps
there when there is nothing to do. No other thread touches an engine in any other way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from enginepool.dispatch.condition import EngineCondition, EngineState
from enginepool.dispatch.queue import RequestQueue
from enginepool.dispatch.request import Request
from enginepool.engine.gil_limiter import Limiter
from enginepool.engine.intake import Intake
from enginepool.engine.jobs import Jobs, stop_engine
from enginepool.engine.single_stepping import SingleStepping
from enginepool.lora.adapter import Adapters

if TYPE_CHECKING:
    from sgl_jax.srt.managers.schedule_batch import Req


class Channel(Intake):
    """The way into one engine, from any thread. Jobs run on the engine's thread.

    Attributes:
        adapters: The pool's adapters.
        max_decode_steps: How many decode steps one launch may have.
        single_stepping: Whether the engine launches one step at a time, so that it can stop at the
            same time as other engines.
        limiter: Shared with other engines. An engine that has work holds a slot, except while it
            waits for its device.
        steps: How many steps began.
        steady_steps: How many of them were decode steps that stayed on the device (`steady/`).
        steady_dispatches: How many launches those steps took.
        fallback_steps: How many were decode steps by upstream's own programs.
        busy_since: When the first step after the last idle time began, in `time.perf_counter`.
    """

    def __init__(
        self,
        engine_index: int,
        queue: RequestQueue,
        limiter: Limiter,
        condition: EngineCondition,
        *,
        max_decode_steps: int = 1,
        adapters: Adapters | None = None,
    ) -> None:
        super().__init__(engine_index, queue, condition)
        self.limiter = limiter
        self.max_decode_steps = max_decode_steps
        self.adapters = Adapters() if adapters is None else adapters
        self.single_stepping = SingleStepping()
        self.steps = self.steady_steps = self.steady_dispatches = self.fallback_steps = 0
        self.busy_since = 0.0
        self._jobs = Jobs(self.wake)

    # Any thread

    def run[T](self, job: Callable[[], T]) -> Future[T]:
        """See `Jobs.add`."""
        return self._jobs.add(job)

    def run_when[T](self, condition: Callable[[], bool], job: Callable[[], T]) -> Future[T]:
        """See `Jobs.add_when`."""
        return self._jobs.add_when(condition, job)

    def stop(self) -> None:
        """End the engine's loop at its next step boundary."""
        self.run(stop_engine)

    def stop_stuck(self, why: str) -> None:
        """`stop` for a stuck engine: all other jobs fail now."""
        self._jobs.close(why, last=stop_engine)

    def abort(self, requests: Iterable[Request]) -> None:
        """End these requests, if the engine has them. They keep the tokens that they have."""
        internal_rids = [request.internal_rid for request in requests]
        self.run(lambda: self._abort(internal_rids))

    def load(self) -> int:
        return len(self.running)

    def has_requests(self) -> bool:
        """Whether the engine has requests, or takes some from the queue at this moment."""
        with self.running.lock:
            return bool(self.running)

    def kv_usage(self) -> tuple[int, int]:
        """See `StepScheduler.kv_usage`; zeros while there is no scheduler."""
        scheduler = self._scheduler
        try:
            return (0, 0) if scheduler is None else scheduler.kv_usage()
        except AttributeError:  # it is being taken apart at this moment
            return (0, 0)

    def abandon(self, since: float, reason: str) -> list[Request] | None:
        """Take the requests away from a step that does not return.

        If the step returns later, its results are dropped and the engine is reset.

        Args:
            since: When the step began.

        Returns:
            None if that step has returned.
        """
        with self.running.lock:  # the step may return at this moment
            if self.condition.stepping_since != since:
                return None
            self.condition.change(EngineState.ABANDONED, reason)
            self.queue.detach(self.engine_index)
            return self.close(f"engine {self.engine_index} is abandoned: {reason}")

    # The engine's thread

    def recv_requests(self) -> list[Req]:
        """The step boundary. It admits requests itself, because upstream's message cannot carry the
        outputs of a resumed one. So it returns an empty list."""
        self._end_step()
        condition, scheduler = self.condition, self._attached()
        idled = self.steps == 0
        while True:
            self._wake.clear()
            if self._jobs.due():
                self.limiter.release()  # a job may take long, or wait for other engines
                self._jobs.run_due()
            if not condition.paused:
                if condition.kv_not_finite and not self.running:
                    scheduler.reset()
                    condition.kv_not_finite = False
                if condition.may_step:
                    if idled:
                        scheduler.check_weights()
                    self.pull()
                    if scheduler.has_scores():
                        self._begin_step(idled)
                        scheduler.score()
                        self._end_step()
                        idled = False
                        if not scheduler.has_work():
                            continue
                if scheduler.has_work():
                    self._begin_step(idled)
                    return []
            self.limiter.release()
            self._wake.wait()
            idled = True

    def _end_step(self) -> None:
        with self.running.lock:
            self.condition.stepping_since = None
            self._check_abandoned()

    def _begin_step(self, idled: bool) -> None:
        self.limiter.hold()
        self.condition.stepping_since = now = time.perf_counter()
        if idled:
            self.busy_since = now
        self.steps += 1

    # Between two steps without a boundary between them: see `steady/decode.py`

    def between_steps[T](self, take_over: Callable[[], T]) -> T:
        """Call `take_over`, which takes the results of a step while the next step runs.

        Raises:
            StepTimeout: The requests were taken away meanwhile.
        """
        with self.running.lock:
            self._check_abandoned()
            taken = take_over()
            self.condition.stepping_since = time.perf_counter()
        return taken

    def has_jobs(self) -> bool:
        """Whether there is something to do at a step boundary."""
        return self._jobs.due()

    def wait_for_new_requests(self, timeout: float) -> None:
        """Does nothing. Upstream sleeps here between two polls, but `recv_requests` blocks."""

    def open(self) -> None:
        """Take jobs, also after `close`."""
        self._jobs.open()

    def close(self, why: str) -> list[Request]:
        """Run no more jobs. Returns the engine's requests, with the tokens that they have."""
        self.condition.stepping_since = None
        self._jobs.close(why)
        self._scheduler = None
        return self.running.retract()

    def has_work(self) -> bool:
        """Whether the engine has requests, or its scheduler has work."""
        scheduler = self._scheduler
        return bool(self.running) or (scheduler is not None and scheduler.has_work())
