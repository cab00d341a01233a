"""Requests on their way to engines and back: submitted, aborted, resumed, failed, counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from enginepool.config import PoolConfig
from enginepool.dispatch.condition import DesiredState, EngineCondition
from enginepool.dispatch.queue import RequestQueue
from enginepool.dispatch.queue_limit import QueueLimit
from enginepool.dispatch.request import Call, Request, aborted
from enginepool.dispatch.steering_lock import SteeringLock
from enginepool.errors import (
    EnginePoolError,
    InvalidRequest,
    NoWeights,
    PoolClosed,
    PoolFailed,
    QueueFull,
)
from enginepool.process.forks import PoolProcess


class Counts:
    """How many requests and tokens a pool has served. Read as it is."""

    def __init__(self) -> None:
        self.finished = self.aborted = self.prompt_tokens = self.completion_tokens = 0
        self._lock = threading.Lock()

    def add(self, request: Request) -> None:
        aborted = (request.finish_reason or {}).get("type") == "abort"
        with self._lock:
            self.finished += not aborted
            self.aborted += aborted
            self.prompt_tokens += len(request.input_ids) if request.ran else 0
            self.completion_tokens += len(request.output_ids) - request.given


@dataclass(frozen=True, eq=False)
class EngineRecord:
    """An engine as its pool's calls know it.

    Attributes:
        index: Which of the pool's engines it is.
        condition: What it may do.
        abort: Ends requests that it runs after its current step. Any thread; returns at once.
    """

    index: int
    condition: EngineCondition
    abort: Callable[[list[Request]], None]


class Dispatch:
    """All of a pool's requests. Thread-safe.

    Attributes:
        engines: The pool's, in order; filled when it opens.
        closed: No call is taken any more.
        lock: Held while `closed` changes, and by who must not miss that.
    """

    def __init__(
        self, name: str, config: PoolConfig, desired: DesiredState, steering: SteeringLock
    ) -> None:
        self.name = name
        self.process = PoolProcess(name)
        self.queue = RequestQueue()
        self.queue_limit = QueueLimit(self.queue, config.max_queued, config.when_full)
        self.engines: list[EngineRecord] = []
        self.counts = Counts()
        self.closed = False
        self.lock = threading.Lock()
        self._desired = desired
        self._steering = steering
        self._calls: set[Call] = set()

    @property
    def waiting(self) -> int:
        """How many requests no engine holds yet."""
        return len(self.queue) + len(self.queue_limit)

    def serving(self) -> list[EngineRecord]:
        """Engines that may be given requests."""
        return [engine for engine in self.engines if engine.condition.serving]

    def submit(self, call: Call) -> None:
        """Queue a call's requests.

        Raises:
            PoolClosed: The pool is closed.
            NoWeights: The weights were released, or lost on every engine.
            PoolFailed: No engine is left.
            QueueFull: See `EnginePool`.
            InvalidRequest: See `refuse_to_wait`.
        """
        self.refuse_to_wait(call)
        call.on_finish = self._finished
        with self.lock:
            self.check_open()
            if (why := self._desired.no_weights) is not None:
                raise NoWeights(f"pool {self.name!r} has no weights: {why}")
            for pinned_to in {request.pinned_to for request in call.requests}:
                if not self._will_be_served(pinned_to):
                    raise self.failure(pinned_to)
            if call.requests:
                self._calls.add(call)
        try:
            self.queue_limit.enter(call)
        except QueueFull:
            with self.lock:
                self._calls.discard(call)
            raise
        self.fail_unserved()

    def refuse_to_wait(self, call: Call) -> None:
        """Before a caller waits for outputs.

        Raises:
            InvalidRequest: From the iterator that `update_weights` reads, while no engine that
                may run them takes a step.
        """
        if (outer := self._steering.inside()) is None:
            return
        for pinned_to in {request.pinned_to for request in call.requests}:
            able = [e for e in self.serving() if pinned_to in (None, e.index)]
            if all(engine.condition.paused for engine in able):
                raise InvalidRequest(
                    f"generating inside {outer} would wait for ever: no engine takes a step before "
                    "it returns; generate before it, or use staging='double' without free_kv=True "
                    "on a pool that is not paused, where engines serve while an iterator is read"
                )

    def abort(self, requests: Iterable[Request], message: str, err_type: str) -> None:
        """End exactly these requests; they keep what they have.

        Returns at once. A running request ends after its engine's current step.
        """
        reason = aborted(message, err_type)
        by_engine: dict[int, list[Request]] = {}
        for request in requests:
            if request.finish_reason is not None:
                continue
            # First: whoever moves the request from here on looks at this.
            request.abort_reason = reason
            if self.queue.discard(request) or self.queue_limit.discard(request):
                request.call.finish(request, reason)
            elif request.engine_index is not None:
                by_engine.setdefault(request.engine_index, []).append(request)
        for index, group in by_engine.items():
            self.engines[index].abort(group)

    def find(self, rid: str) -> list[Request]:
        """The unfinished requests whose id, as results show it, is exactly `rid`."""
        return [request for request in self.unfinished() if rid == request.shown_rid]

    def unfinished(self) -> list[Request]:
        with self.lock:
            calls = list(self._calls)
        return [r for call in calls for r in call.requests if r.finish_reason is None]

    def resume(self, requests: Iterable[Request]) -> None:
        """Queue requests again that were taken out of an engine."""
        again = []
        for request in requests:
            if request.abort_reason is not None:
                request.call.finish(request, request.abort_reason)
            else:
                again.append(request)
        self.queue.put(again, resumed=True)
        for request in again:  # aborted between the look and the put
            if request.abort_reason is not None and self.queue.discard(request):
                request.call.finish(request, request.abort_reason)
        self.fail_unserved()

    def take_waiting(self) -> list[Request]:
        """Take out everything that no engine holds."""
        return self.queue.drain() + self.queue_limit.drain()

    def fail(self, requests: Iterable[Request], error: EnginePoolError) -> None:
        """End requests, and raise `error` where their callers wait."""
        reason = aborted(str(error), type(error).__name__)
        for request in requests:
            request.call.failure = error
            request.call.finish(request, reason)

    def check_open(self) -> None:
        """Raises PoolClosed on a closed pool."""
        if self.closed:
            raise PoolClosed(f"pool {self.name!r} is already closed")

    def failure(self, pinned_to: int | None = None) -> EnginePoolError:
        """What to raise where no engine can do it."""
        if self.closed:
            return PoolClosed(f"pool {self.name!r} is already closed")
        meant = self.engines if pinned_to is None else [self.engines[pinned_to]]
        unloaded = any(engine.condition.reachable for engine in meant)
        return (NoWeights if unloaded else PoolFailed)(self._why_failed(pinned_to))

    def _why_failed(self, pinned_to: int | None) -> str:
        if pinned_to is not None:
            condition = self.engines[pinned_to].condition
            return (
                f"engine {pinned_to} of pool {self.name!r} is {condition.state.value} "
                f"({condition.reason}); calls of the pool itself go to the other engines"
            )
        reasons = "; ".join(f"engine {e.index}: {e.condition.reason}" for e in self.engines)
        return f"pool {self.name!r} has no engine left ({reasons})"

    def _finished(self, request: Request) -> None:
        self.counts.add(request)
        if request.call.done:
            with self.lock:
                self._calls.discard(request.call)

    def _will_be_served(self, pinned_to: int | None) -> bool:
        """Whether an engine is left that may run such a request."""
        engines = self.engines if pinned_to is None else [self.engines[pinned_to]]
        return any(engine.condition.will_serve for engine in engines)

    def fail_unserved(self) -> None:
        """End what waits for engines that have left, also between a look and a `put`."""
        if self.closed or self._desired.no_weights is not None:
            return  # `close` ends everything, `update_weights` goes on
        if not self._will_be_served(None):
            self.fail(self.take_waiting(), self.failure(None))
        for engine in self.engines:
            if not self._will_be_served(engine.index):
                outside = self.queue_limit.take_pinned_to(engine.index)
                inside = self.queue.take_pinned_to(engine.index)
                self.fail(outside + inside, self.failure(engine.index))
