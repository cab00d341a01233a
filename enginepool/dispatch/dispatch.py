"""A pool's requests: submitted, aborted, resumed, failed and counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

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
    """How many requests and tokens a pool has served. Reading takes no lock."""

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
    """What calls need to know about an engine.

    Attributes:
        index: The engine's index in the pool.
        condition: The engine's state, and what it may do.
        abort: Ends running requests after the current step. Any thread may call it. It returns at
            once.
    """

    index: int
    condition: EngineCondition
    abort: Callable[[list[Request]], None]


class Dispatch:
    """All of a pool's requests. Thread-safe.

    Attributes:
        engines: The pool's engines, in order. Empty until the pool opens.
        closed: Whether the pool takes no more calls.
        lock: Protects `closed`. A thread that holds it can check `closed` and then act.
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
        """How many requests wait for an engine."""
        return len(self.queue) + len(self.queue_limit)

    def serving(self) -> list[EngineRecord]:
        """The engines that may get requests."""
        return [engine for engine in self.engines if engine.condition.serving]

    def submit(self, call: Call) -> None:
        """Queue a call's requests.

        Raises:
            PoolClosed: The pool is closed.
            NoWeights: The weights were released, or every engine has lost them.
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
                if not self.will_be_served(pinned_to):
                    raise self.failure(pinned_to)
            if call.requests:
                self._calls.add(call)
        try:
            self.queue_limit.enter(call)
        except QueueFull:
            with self.lock:
                self._calls.discard(call)
            raise
        self._end_aborted(call.requests)  # aborted before they waited anywhere
        self.fail_unserved()

    def refuse_to_wait(self, call: Call) -> None:
        """Check that the caller may wait for outputs.

        Raises:
            InvalidRequest: The caller runs inside the iterator that `update_weights` reads. No
                engine that may run the call takes a step until `update_weights` returns.
        """
        if (outer := self._steering.inside()) is None:
            return
        for pinned_to in {request.pinned_to for request in call.requests}:
            able = [e for e in self.serving() if pinned_to in (None, e.index)]
            if all(engine.condition.paused for engine in able):
                raise InvalidRequest(
                    f"generating inside {outer} would wait for ever: no engine takes a step until "
                    f"{outer} returns. Generate first. Or do not pause the pool, and update with "
                    "staging='double' and without free_kv=True"
                )

    def abort(self, requests: Iterable[Request], message: str, err_type: str) -> None:
        """End exactly these requests. They keep the tokens that they have.

        Returns at once. A running request ends after its engine's current step.
        """
        reason = aborted(message, err_type)
        by_engine: dict[int, list[Request]] = {}
        for request in requests:
            if request.finish_reason is not None:
                continue
            # Set first: every thread that moves the request checks it.
            request.abort_reason = reason
            if not self._end_waiting(request, reason) and request.engine_index is not None:
                by_engine.setdefault(request.engine_index, []).append(request)
        self.queue_limit.let_in()
        for index, group in by_engine.items():
            self.engines[index].abort(group)

    def find(self, rid: str) -> list[Request]:
        """The unfinished requests with exactly this id, as results show it."""
        return [request for request in self.unfinished() if rid == request.shown_rid]

    def unfinished(self) -> list[Request]:
        with self.lock:
            calls = list(self._calls)
        return [r for call in calls for r in call.requests if r.finish_reason is None]

    def resume(self, requests: Iterable[Request]) -> None:
        """Put requests that were taken from an engine back into the queue."""
        again = []
        for request in requests:
            if request.abort_reason is not None:
                request.call.finish(request, request.abort_reason)
            else:
                again.append(request)
        self.queue.put(again, resumed=True)
        self._end_aborted(again)  # aborted between the check and the put
        self.fail_unserved()

    def _end_aborted(self, requests: Iterable[Request]) -> None:
        """End requests that were aborted, if they wait for an engine."""
        for request in requests:
            if request.abort_reason is not None:
                self._end_waiting(request, request.abort_reason)
        self.queue_limit.let_in()

    def _end_waiting(self, request: Request, reason: dict[str, Any]) -> bool:
        """End a request that waits for an engine. False if it does not. The caller calls `let_in`
        afterwards: the rest of a call may fit then, or the call behind it."""
        waits = self.queue.discard(request) or self.queue_limit.holds(request)
        if waits:
            request.call.finish(request, reason)
        return waits

    def take_waiting(self, pinned_to: int | None = None) -> list[Request]:
        """Remove and return all requests that wait for an engine, or those that only this engine
        may run."""
        # Those outside come first, because a call may enter the queue meanwhile.
        if pinned_to is None:
            return self.queue_limit.drain() + self.queue.drain()
        return self.queue_limit.take_pinned_to(pinned_to) + self.queue.take_pinned_to(pinned_to)

    def fail(self, requests: Iterable[Request], error: EnginePoolError) -> None:
        """End requests. Their callers raise `error`."""
        reason = aborted(str(error), type(error).__name__)
        for request in requests:
            request.call.failure = error
            request.call.finish(request, reason)

    def check_open(self) -> None:
        """Raise PoolClosed if the pool is closed."""
        if self.closed:
            raise PoolClosed(f"pool {self.name!r} is already closed")

    def failure(self, pinned_to: int | None = None) -> EnginePoolError:
        """The error to raise if no engine can run a request."""
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

    def will_be_served(self, pinned_to: int | None) -> bool:
        """Whether an engine that may run such a request serves or will serve."""
        engines = self.engines if pinned_to is None else [self.engines[pinned_to]]
        return any(engine.condition.will_serve for engine in engines)

    def fail_unserved(self) -> None:
        """End requests that wait for engines that will not serve again.

        Callers call it after each `put`, since an engine may leave just before.
        """
        if self.closed or self._desired.no_weights is not None:
            return  # `close` ends all requests; `update_weights` will let them continue
        if not self.will_be_served(None):
            self.fail(self.take_waiting(), self.failure(None))
        for engine in self.engines:
            if not self.will_be_served(engine.index):
                self.fail(self.take_waiting(engine.index), self.failure(engine.index))
