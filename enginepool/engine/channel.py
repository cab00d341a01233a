"""The channel: the only door into an engine (upstream's communication backend).

Upstream's loop calls `recv_requests` at the top of every iteration on the engine's own thread,
so that call is the step boundary: control jobs run there, new requests enter there, and it
blocks there when there is nothing to do. Nothing else touches an engine from another thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from enginepool.engine.jobs import EngineBroken, Jobs, StopEngine
from enginepool.engine.limiter import Turns
from enginepool.engine.running import Books
from enginepool.errors import StepTimeout
from enginepool.requests.queue import RequestQueue
from enginepool.requests.request import Request, aborted

if TYPE_CHECKING:
    from enginepool.engine.scheduler import PinnedScheduler
    from enginepool.weights.leaves import EngineLeaves


class Channel:
    """One engine's door, used from any thread; what runs inside runs on the engine's thread.

    Attributes:
        scheduler: Upstream's, while the engine does jobs.
        leaves: The engine's weights; their specs can be read as long as the pool is open.
        books: The requests that the engine has.
        soiled: Whether the KV cache may have numbers in it that are not finite.
        stops: Why no step is taken (paused, or in a swap); empty when the engine goes on.
        draining: Whether it only finishes what has begun, here or on an engine that failed.
        weightless: Why the engine has no weights to step with, if it has none.
        stepping_since: When the step that runs now began, in `time.perf_counter`, if one does.
        turns: With other engines; this one has its turn from a step's begin to its end, but for
            the wait for its device.
        busy_since: When the first step after the last idling began, in `time.perf_counter`.
    """

    def __init__(self, engine_index: int, queue: RequestQueue, turns: Turns) -> None:
        self.engine_index = engine_index
        self.queue = queue
        self.turns = turns
        self.scheduler: PinnedScheduler | None = None
        self.leaves: EngineLeaves | None = None
        self.books = Books()
        self.steps = 0
        self.stepping_since: float | None = None
        self.busy_since = 0.0
        self.soiled = False
        self.stops: set[str] = set()
        self.draining = False
        self.weightless: str | None = None
        self._wake = threading.Event()
        self._jobs = Jobs(self.wake)
        self._abandoned: str | None = None

    # Any thread

    def wake(self) -> None:
        self._wake.set()

    def run(self, job: Callable[[], Any]) -> Future[Any]:
        """See `Jobs.add`."""
        return self._jobs.add(job)

    def run_when(self, condition: Callable[[], bool], job: Callable[[], Any]) -> Future[Any]:
        """See `Jobs.add_when`."""
        return self._jobs.add_when(condition, job)

    @property
    def paused(self) -> bool:
        return "paused" in self.stops

    def stop(self) -> None:
        """End the engine's loop at its next step boundary."""
        self.run(_leave)

    def give_up(self, why: str) -> None:
        """`stop`, for an engine that nobody waits for any longer: all other jobs fail now."""
        self._jobs.close(why, last=_leave)

    def abort(self, requests: Iterable[Request]) -> None:
        """End exactly these requests, if the engine has them, keeping what they have."""
        rids = [request.rid for request in requests]
        self.run(lambda: self._abort(rids))

    def load(self) -> int:
        return len(self.books)

    def kv_usage(self) -> tuple[int, int]:
        """Tokens of KV cache in use (what the prefix cache may evict is free) and in all."""
        scheduler = self.scheduler
        try:
            return (0, 0) if scheduler is None else scheduler.kv_usage()
        except AttributeError:  # it is being taken apart at this moment
            return (0, 0)

    def abandon(self, since: float, why: str) -> list[Request] | None:
        """Take the requests of the step that began then; None if it has returned.

        What it still does to its own objects reaches nobody.
        """
        with self.books.lock:
            if self.stepping_since != since:
                return None
            self._abandoned = why
            return self.close(why)

    # The engine's thread

    def recv_requests(self) -> list[Any]:
        """The step boundary. Always returns an empty list: requests are admitted right here,
        because only here can a resumed one get its outputs put in place."""
        self.turns.give()
        with self.books.lock:
            self.stepping_since = None
            if self._abandoned is not None:
                raise StepTimeout(self._abandoned)
        assert self.scheduler is not None
        waited = self.steps == 0
        while True:
            self._wake.clear()
            self._jobs.run_due()
            if not self.stops:
                if self.soiled and not self.books.held and not self.scheduler.has_work():
                    self.scheduler.reset()
                    self.soiled = False
                if self.weightless is None:
                    if waited:
                        self.scheduler.look_at_weights()
                    self._pull()
                if self.scheduler.has_work():
                    self.turns.take()
                    self.stepping_since = time.perf_counter()
                    if waited:
                        self.busy_since = self.stepping_since
                    self.steps += 1
                    return []
            self._wake.wait()
            waited = True

    def send_pyobj(self, message: Any) -> None:
        """Upstream's notice that it dropped a request which was not running (abort, or no KV)."""
        reason = aborted("the engine's KV cache cannot hold this request", "out_of_memory")
        self.books.end(getattr(message, "rid", None) or "", reason)

    def wait_for_new_requests(self, timeout: float) -> None:
        """Upstream's pause of its polling loop; `recv_requests` blocks instead."""

    def open(self) -> None:
        """Jobs run again, in an engine that came back."""
        with self.books.lock:
            self._abandoned = None
        self._jobs.open()

    def close(self, why: str) -> list[Request]:
        """No job will run any more; returns the requests that were held, progress taken over."""
        self.stepping_since = None
        self._jobs.close(why)
        requests = self.books.retract()
        self.scheduler = None
        return requests

    def take_back(self) -> list[Request]:
        """Take all requests out of the engine, with the tokens that they have; its KV cache is
        free and empty.

        Raises:
            EngineBroken: The scheduler's state is beyond that; the engine leaves its loop.
        """
        assert self.scheduler is not None
        requests = self.books.retract()
        try:
            self.scheduler.release_all()
        except Exception as error:
            # Held again until the engine has left; then they resume on its siblings.
            self.books.held.update((request.rid, request) for request in requests)
            raise EngineBroken(f"could not release its requests: {error!r}") from error
        return requests

    def _pull(self) -> None:
        scheduler = self.scheduler
        assert scheduler is not None
        if self.books.closed_to_others:
            return
        taken = self.queue.take(
            self.engine_index,
            load=len(self.books.held),
            room=scheduler.room(len(self.books.held)),
            cached=scheduler.cached_prefix,
            begun=self.draining,
        )
        for request in taken:
            request.engine_index = self.engine_index
            self.books.held[request.rid] = request
        for request in taken:
            request.req = scheduler.admit(request)
            if request.abort_reason is not None:  # aborted on its way from the queue to here
                self._abort([request.rid])

    def _abort(self, rids: list[str]) -> None:
        assert self.scheduler is not None
        for rid in rids:
            request = self.books.held.get(rid)
            if request is None:
                continue
            if self.stops and request.abort_reason is not None:
                # No step will end it before the pool goes on; its caller need not wait for that.
                self.books.take_over(request, keep=True)
                request.call.finish(request, request.abort_reason)
            self.scheduler.abort(rid)


def _leave() -> None:
    raise StopEngine
