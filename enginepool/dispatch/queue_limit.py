"""`max_queued`: if the queue has no room for a call, the call waits in front of it or is
refused."""

from __future__ import annotations

import threading
from collections import deque

from enginepool.config import WhenFull
from enginepool.dispatch.queue import RequestQueue
from enginepool.dispatch.request import Call, Request
from enginepool.errors import QueueFull


class QueueLimit:
    """Admits whole calls to the queue, in order of arrival. Thread-safe."""

    def __init__(self, queue: RequestQueue, limit: int | None, when_full: WhenFull) -> None:
        self._queue = queue
        self._limit = limit
        self._when_full = when_full
        self._outside: deque[Call] = deque()
        self._lock = threading.Lock()
        queue.on_taken = self.let_in

    def __len__(self) -> int:
        """How many requests wait in front of the queue."""
        with self._lock:
            return sum(call.remaining for call in self._outside)

    def enter(self, call: Call) -> None:
        """Queue a call's requests, at once or when there is room.

        A call that is larger than the limit enters when the queue is empty.

        Raises:
            QueueFull: There is no room, and `when_full` is "raise".
        """
        with self._lock:
            if not self._outside and self._fits(call):
                self._queue.put(call.requests)
            elif self._when_full == "raise":
                raise QueueFull(
                    f"{len(self._queue)} requests wait and this call has {len(call.requests)}: at "
                    f"most max_queued={self._limit} may wait; try again later, or make the pool "
                    "with a larger max_queued"
                )
            else:
                self._outside.append(call)

    def holds(self, request: Request) -> bool:
        """Whether the request waits in front of the queue. If it ends meanwhile, `let_in` drops
        it."""
        with self._lock:
            return request.call in self._outside

    def drain(self) -> list[Request]:
        """Remove and return all requests."""
        with self._lock:
            calls, self._outside = self._outside, deque()
        return [request for call in calls for request in call.requests]

    def take_pinned_to(self, engine_index: int) -> list[Request]:
        """Remove and return the requests of calls that only this engine may run."""
        with self._lock:
            calls = [
                call
                for call in self._outside
                if any(request.pinned_to == engine_index for request in call.requests)
            ]
            self._outside = deque(call for call in self._outside if call not in calls)
        self.let_in()  # a call behind them may fit
        return [request for call in calls for request in call.requests]

    def _fits(self, call: Call) -> bool:
        waiting = len(self._queue)
        return self._limit is None or not waiting or waiting + call.remaining <= self._limit

    def let_in(self) -> None:
        """Queue the calls that have room now, in order of arrival. Called whenever room may have
        come: a request has left the queue, or one in front of it has ended."""
        if self._limit is None:  # no call ever waits
            return
        aborted = []
        with self._lock:
            while self._outside and self._fits(self._outside[0]):
                call = self._outside.popleft()
                left = [request for request in call.requests if request.finish_reason is None]
                self._queue.put(request for request in left if request.abort_reason is None)
                aborted += [request for request in left if request.abort_reason is not None]
        for request in aborted:  # `abort` may have found them neither here nor in the queue
            request.call.finish(request, request.abort_reason)
