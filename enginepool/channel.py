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

from enginepool.errors import NotFinite, StepTimeout
from enginepool.jobs import EngineBroken, Jobs, StopEngine
from enginepool.queue import RequestQueue
from enginepool.requests import Request, aborted, not_finite

if TYPE_CHECKING:
    from enginepool.scheduler import PinnedScheduler


class Channel:
    """One engine's door, used from any thread; what runs inside runs on the engine's thread.

    Attributes:
        held: The requests that this engine has, by rid. Changed under `lock` only.
        lock: Held while outputs are handed over: a step that is given up may return just then.
        weight_version: The version that the engine's next step samples from.
        swaps: How many times weights were replaced here; separates the prefix cache's entries.
        not_finite: The update of weights (`swaps`) that gives no finite numbers on any engine.
        soiled: Whether the KV cache may have numbers in it that are not finite.
        stops: Why no step is taken (paused, or in a swap); empty when the engine goes on.
        draining: Whether it finishes what it has and takes nothing new.
        weightless: Why the engine has no weights to step with, if it has none.
        stepping_since: When the step that runs now began, in `time.perf_counter`, if one does.
        busy_since: When the first step after the last idling began, in `time.perf_counter`.
        last_output: When a request last ended here, likewise.
    """

    def __init__(self, engine_index: int, queue: RequestQueue) -> None:
        self.engine_index = engine_index
        self.queue = queue
        self.scheduler: PinnedScheduler | None = None
        self.held: dict[str, Request] = {}
        self.weight_version: int | str = 0
        self.lock = threading.RLock()
        self.steps = 0
        self.stepping_since: float | None = None
        self.busy_since = self.last_output = 0.0
        self.swaps = 0
        self.not_finite: int | None = None
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

        def leave() -> None:
            raise StopEngine

        self.run(leave)

    def abort(self, requests: Iterable[Request]) -> None:
        """End exactly these requests, if the engine has them, keeping what they have."""
        rids = [request.rid for request in requests]
        self.run(lambda: self._abort(rids))

    def load(self) -> int:
        return len(self.held)

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
        with self.lock:
            if self.stepping_since != since:
                return None
            self._abandoned = why
            return self.close(why)

    # The engine's thread

    def recv_requests(self) -> list[Any]:
        """The step boundary. Always returns an empty list: requests are admitted right here,
        because only here can a resumed one get its outputs put in place."""
        with self.lock:
            self.stepping_since = None
            if self._abandoned is not None:
                raise StepTimeout(self._abandoned)
        assert self.scheduler is not None
        waited = self.steps == 0
        while True:
            self._wake.clear()
            self._jobs.run_due()
            if not self.stops:
                if self.soiled and not self.held and not self.scheduler.has_work():
                    self.scheduler.reset()
                    self.soiled = False
                if not self.draining and self.weightless is None:
                    self._pull()
                if self.scheduler.has_work():
                    self.stepping_since = time.perf_counter()
                    if waited:
                        self.busy_since = self.stepping_since
                    self.steps += 1
                    return []
            self._wake.wait()
            waited = True

    def send_pyobj(self, message: Any) -> None:
        """Upstream's notice that it dropped a request which was not running (abort, or no KV)."""
        with self.lock:
            request = self.held.pop(getattr(message, "rid", None) or "", None)
            if request is None:
                return
            self._take_over(request)
            reason = request.abort_reason or aborted(
                "the engine's KV cache cannot hold this request", "out_of_memory"
            )
            request.call.finish(request, reason)

    def wait_for_new_requests(self, timeout: float) -> None:
        """Upstream's pause of its polling loop; `recv_requests` blocks instead."""

    def open(self) -> None:
        """Jobs run again, in an engine that came back."""
        with self.lock:
            self._abandoned = None
        self._jobs.open()

    def close(self, why: str) -> list[Request]:
        """No job will run any more; returns the requests that were held, progress taken over."""
        self.stepping_since = None
        self._jobs.close(why)
        requests = self.retract()
        self.scheduler = None
        return requests

    def retract(self) -> list[Request]:
        """Take every unfinished request out of the books, with the tokens that it has.

        The scheduler's own state is not touched: for an engine that stays, the caller has the
        scheduler release everything next.
        """
        with self.lock:
            for request in list(self.held.values()):
                req = request.req
                finished = req is not None and req.finished()
                self._take_over(request)
                # Unless the step that finished it failed half way.
                if req is not None and finished and len(request.output_ids) == len(req.output_ids):
                    self.deliver(request, req)
            requests, self.held = list(self.held.values()), {}
        for request in requests:
            request.taken_back = True
            request.owed = len(request.output_ids)
        return requests

    def take_back(self) -> list[Request]:
        """`retract`, and the engine forgets them: its KV cache is free and empty.

        Raises:
            EngineBroken: The scheduler's state is beyond that; the engine leaves its loop.
        """
        assert self.scheduler is not None
        requests = self.retract()
        try:
            self.scheduler.release_all()
        except Exception as error:
            # Held again until the engine has left; then they resume on its siblings.
            self.held.update((request.rid, request) for request in requests)
            raise EngineBroken(f"could not release its requests: {error!r}") from error
        return requests

    def progressed(self) -> bool:
        """Whether every request here has gained a token since it was last taken back."""
        return all(
            request.req is not None and len(request.req.output_ids) > request.owed
            for request in self.held.values()
        )

    def set_version(self, version: int | str) -> None:
        """Tokens from here on come from other weights; those so far are booked on the old."""
        for request in self.held.values():
            self._take_over(request, keep=True)
        self.weight_version = version
        self.swaps += 1

    def cache_key(self, request: Request) -> str | None:
        """The prefix cache's namespace: entries of other weights are never found."""
        return f"{self.swaps}/{request.extra_key or ''}" if self.swaps else request.extra_key

    def deliver(self, request: Request, req: Any) -> None:
        """Hand a finished upstream request to its caller."""
        self.last_output = time.perf_counter()
        self.held.pop(request.rid, None)
        self._take_over(request)
        reason = req.finished_reason.to_json()
        if reason.get("type") == "abort" and request.abort_reason is not None:
            reason = request.abort_reason
        request.call.finish(request, reason)

    def not_finite_outputs(self, requests: list[Request]) -> None:
        """Their newest log-probability is no finite number, so nor is the KV cache that they
        wrote. They end where that is known to be the weights' fault.

        Raises:
            NotFinite: It may be this engine's fault.
        """
        if self.not_finite != self.swaps:
            raise NotFinite(requests)
        assert self.scheduler is not None
        self.soiled = True
        for request in requests:
            del self.held[request.rid]
            self._take_over(request)
            self.scheduler.abort(request.rid)
            request.call.finish(request, not_finite(self.weight_version))

    def publish(self, request: Request) -> None:
        """Offer what a streamed request has so far to its caller."""
        self._take_over(request, keep=True)
        request.call.publish(request, request.output_ids, request.logprobs)

    def _take_over(self, request: Request, *, keep: bool = False) -> None:
        """Copy what upstream's request has; it is let go unless the engine goes on with it."""
        req = request.req
        if req is None:
            return
        request.absorb(
            list(req.output_ids), list(req.output_token_logprobs_val), self.weight_version
        )
        if request.cached_tokens is None:  # later admissions would count the outputs as well
            request.cached_tokens = req.cached_tokens
        if not keep:
            request.req = None

    def _pull(self) -> None:
        scheduler = self.scheduler
        assert scheduler is not None
        if len(self.held) == 1 and next(iter(self.held.values())).alone:
            return
        taken = self.queue.take(
            self.engine_index,
            load=len(self.held),
            room=scheduler.room(len(self.held)),
            cached=scheduler.cached_prefix,
        )
        for request in taken:
            request.engine_index = self.engine_index
            self.held[request.rid] = request
        for request in taken:
            request.req = scheduler.admit(request)
            if request.abort_reason is not None:  # aborted on its way from the queue to here
                self._abort([request.rid])

    def _abort(self, rids: list[str]) -> None:
        assert self.scheduler is not None
        for rid in rids:
            request = self.held.get(rid)
            if request is None:
                continue
            if self.stops and request.abort_reason is not None:
                # No step will end it before the pool goes on; its caller need not wait for that.
                self._take_over(request, keep=True)
                request.call.finish(request, request.abort_reason)
            self.scheduler.abort(rid)
