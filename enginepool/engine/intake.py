"""How requests come from the pool's queue into an engine, and how they leave it before they end."""

from __future__ import annotations

import threading
import time

from enginepool.dispatch.condition import EngineCondition
from enginepool.dispatch.queue import RequestQueue
from enginepool.dispatch.request import Request, aborted
from enginepool.engine.jobs import EngineBroken
from enginepool.engine.running import RunningRequests
from enginepool.engine.scheduler_protocol import StepScheduler
from enginepool.errors import StepTimeout


class Intake:
    """The part of a channel that gives requests to the engine's scheduler and takes them back. Used
    on the engine's thread, except `wake`.

    Attributes:
        condition: What the engine may do. It is read before every step.
        running: The requests that the engine has.
    """

    def __init__(self, engine_index: int, queue: RequestQueue, condition: EngineCondition) -> None:
        self.engine_index = engine_index
        self.queue = queue
        self.condition = condition
        self.running = RunningRequests(condition.weights)
        self._scheduler: StepScheduler | None = None
        self._wake = threading.Event()

    def wake(self) -> None:
        self._wake.set()

    def attach(self, scheduler: StepScheduler) -> None:
        """Set the scheduler that steps and takes requests."""
        self._scheduler = scheduler

    def pull(self, at_most: int | None = None) -> None:
        """Take requests from the pool's queue."""
        scheduler = self._attached()
        running = self.running
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
                request.engine_index = self.engine_index
                request.taken_at = request.taken_at or now
        for request in taken:
            req = scheduler.admit(request)
            with running.lock:  # `abandon` may have taken it away meanwhile
                self._check_abandoned()
                request.req = req
            if request.abort_reason is not None:  # aborted on its way from the queue to here
                self._abort([request.internal_rid])
        if any(request.finish_reason is not None for request in taken):
            self.wake()  # there is room again, and perhaps no step follows

    def queued(self) -> int:
        """How many requests wait in the pool's queue; 0 if this engine has no room."""
        running = self.running
        room = self._attached().room(len(running)) > 0 and not running.has_one_alone
        return len(self.queue) if room else 0

    def send_pyobj(self, message: object) -> None:
        """Called when upstream has dropped a request that was not running: it was aborted, or the
        KV cache had no room."""
        reason = aborted("the engine's KV cache cannot hold this request", "out_of_memory")
        self.running.end(getattr(message, "rid", None) or "", reason)

    def retract(self) -> list[Request]:
        """Take all requests out of the engine, with the tokens that they have. Its KV cache is free
        and empty afterwards.

        Raises:
            EngineBroken: The scheduler's state does not allow that. The engine leaves its loop.
        """
        scheduler = self._attached()
        requests = self.running.retract()
        try:
            scheduler.release_all()
        except Exception as error:
            # The engine keeps them until it is quarantined. Then they resume on other engines.
            self.running.hold(requests)
            raise EngineBroken(f"could not release its requests: {error!r}") from error
        return requests

    def _abort(self, internal_rids: list[str]) -> None:
        scheduler = self._attached()
        for internal_rid in internal_rids:
            request = self.running.held.get(internal_rid)
            if request is None:
                continue
            if self.condition.paused and request.abort_reason is not None:
                # Prompts in chunks end in upstream's next iteration, but a paused engine has
                # none. So the caller gets the result here.
                self.running.take_over(request, keep=True)
                request.call.finish(request, request.abort_reason)
            scheduler.abort(internal_rid)

    def _attached(self) -> StepScheduler:
        self._check_abandoned()
        assert self._scheduler is not None, "the channel has no scheduler"
        return self._scheduler

    def _check_abandoned(self) -> None:
        condition = self.condition
        if condition.abandoned:
            raise StepTimeout(f"engine {self.engine_index} is abandoned: {condition.reason}")
