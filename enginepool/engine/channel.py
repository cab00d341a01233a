"""The channel is the only way into an engine. For upstream it is the communication backend.

Upstream's loop calls `recv_requests` at the top of every iteration, on the engine's own thread.
That call is the step boundary: jobs run there, new requests enter there, and the thread sleeps
there when there is nothing to do. No other thread touches an engine in any other way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from enginepool.dispatch.condition import EngineCondition, EngineState
from enginepool.dispatch.queue import RequestQueue
from enginepool.dispatch.request import Request, aborted
from enginepool.engine.gil_limiter import Limiter
from enginepool.engine.jobs import EngineBroken, Jobs, stop_engine
from enginepool.engine.running import RunningRequests
from enginepool.engine.scheduler_protocol import StepScheduler
from enginepool.engine.single_stepping import SingleStepping
from enginepool.errors import StepTimeout
from enginepool.lora.adapter import Adapters

if TYPE_CHECKING:
    from sgl_jax.srt.managers.schedule_batch import Req


class Channel:
    """The way into one engine, from any thread. Jobs run on the engine's thread.

    Attributes:
        condition: What the engine may do. It is read before every step.
        running: The requests that the engine has.
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
        self.engine_index = engine_index
        self.queue = queue
        self.limiter = limiter
        self.condition = condition
        self.max_decode_steps = max_decode_steps
        self.adapters = Adapters() if adapters is None else adapters
        self.single_stepping = SingleStepping()
        self.running = RunningRequests(condition.weights)
        self.steps = self.steady_steps = self.steady_dispatches = self.fallback_steps = 0
        self.busy_since = 0.0
        self._scheduler: StepScheduler | None = None
        self._wake = threading.Event()
        self._jobs = Jobs(self.wake)

    # Any thread

    def wake(self) -> None:
        self._wake.set()

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

    def attach(self, scheduler: StepScheduler) -> None:
        """Set the scheduler that steps and takes requests."""
        self._scheduler = scheduler

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

    def pull(self, at_most: int | None = None) -> None:
        """Take requests from the pool's queue."""
        scheduler, running = self._attached(), self.running
        if running.has_one_alone:
            return
        room = scheduler.room(len(running))
        with running.lock:  # for other threads a request is in the queue or here
            self._check_abandoned()
            taken = self.queue.take(
                self.engine_index,
                load=len(running),
                room=room if at_most is None else min(room, at_most),
                cached=scheduler.cached_prefix,
                begun=self.condition.draining,
                prefilling=scheduler.prefilling(),
                may_start=scheduler.may_start(),
            )
            running.hold(taken)
            now = time.perf_counter()
            for request in taken:
                request.engine_index, request.taken_at = self.engine_index, request.taken_at or now
        for request in taken:
            req = scheduler.admit(request)
            with running.lock:  # `abandon` may have taken it away meanwhile
                self._check_abandoned()
                request.req = req
            if request.abort_reason is not None:  # aborted on its way from the queue to here
                self._abort([request.internal_rid])
        if any(request.finish_reason is not None for request in taken):
            self.wake()  # there is room again, and perhaps no step follows

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

    def queued(self) -> int:
        """How many requests wait in the pool's queue; 0 if this engine has no room."""
        room = self._attached().room(self.load()) > 0 and not self.running.has_one_alone
        return len(self.queue) if room else 0

    def has_jobs(self) -> bool:
        """Whether there is something to do at a step boundary."""
        return self._jobs.due()

    def _check_abandoned(self) -> None:
        condition = self.condition
        if condition.abandoned:
            raise StepTimeout(f"engine {self.engine_index} is abandoned: {condition.reason}")

    def send_pyobj(self, message: object) -> None:
        """Called when upstream has dropped a request that was not running: it was aborted, or the
        KV cache had no room."""
        reason = aborted("the engine's KV cache cannot hold this request", "out_of_memory")
        self.running.end(getattr(message, "rid", None) or "", reason)

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

    def retract(self) -> list[Request]:
        """Take all requests out of the engine, with the tokens that they have. Its KV cache is free
        and empty afterwards.

        Raises:
            EngineBroken: The scheduler's state does not allow that. The engine leaves its loop.
        """
        scheduler, requests = self._attached(), self.running.retract()
        try:
            scheduler.release_all()
        except Exception as error:
            # The engine keeps them until it is quarantined. Then they resume on other engines.
            self.running.hold(requests)
            raise EngineBroken(f"could not release its requests: {error!r}") from error
        return requests

    def has_work(self) -> bool:
        """Whether the engine has requests, or its scheduler has work."""
        scheduler = self._scheduler
        return bool(self.running) or (scheduler is not None and scheduler.has_work())

    def _attached(self) -> StepScheduler:
        self._check_abandoned()
        assert self._scheduler is not None, "the channel has no scheduler"
        return self._scheduler

    def _abort(self, internal_rids: list[str]) -> None:
        scheduler = self._attached()
        for internal_rid in internal_rids:
            if (request := self.running.held.get(internal_rid)) is None:
                continue
            if self.condition.paused and request.abort_reason is not None:
                # Upstream ends the request in its next step, but a paused engine takes none. So the
                # caller gets the result here.
                self.running.take_over(request, keep=True)
                request.call.finish(request, request.abort_reason)
            scheduler.abort(internal_rid)
