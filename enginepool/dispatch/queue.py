"""The pool's queue of requests that wait for an engine. Engines pull from it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice

from enginepool.dispatch import routing
from enginepool.dispatch.condition import EngineCondition
from enginepool.dispatch.request import Request

# How many of the oldest requests routing looks at for prefix affinity, at least.
WINDOW = 64


class RequestQueue:
    """Waiting requests, oldest first. Requests that resume come before new ones.

    Thread-safe. `wake` callables are called outside the lock.

    Attributes:
        on_taken: Called outside the lock whenever requests have left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Dictionaries keep insertion order and remove in constant time.
        self._resumed: dict[str, Request] = {}
        self._fresh: dict[str, Request] = {}
        self._pinned: dict[int, dict[str, Request]] = {}
        self._alone: dict[str, Request] = {}
        self._reserved: dict[str, int] = {}  # the engine that will run one of `_alone`
        self._engines: dict[int, tuple[EngineCondition, Callable[[], int], Callable[[], None]]] = {}
        self._arrival = threading.Condition()
        self._moving = 0
        self.on_taken: Callable[[], None] | None = None

    def __len__(self) -> int:
        return sum(map(len, self._groups()))

    def share(self) -> int:
        """How many of the waiting requests each serving engine can expect, at least."""
        return len(self) // max(1, len(self._engines))

    def _groups(self) -> list[dict[str, Request]]:
        return [self._alone, self._resumed, self._fresh, *self._pinned.values()]

    def attach(
        self,
        engine_index: int,
        condition: EngineCondition,
        load: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        """Register a serving engine. The engine must call `take` right after.

        Args:
            condition: Says whether the engine takes requests now.
            load: Says how many requests the engine holds.
            wake: Wakes the engine.
        """
        with self._lock:
            self._engines[engine_index] = (condition, load, wake)
            # A request in `_alone` may have failed on all other engines. Then only this engine may
            # run it, and a reservation of another engine would prevent that.
            self._reserved.clear()

    def detach(self, engine_index: int) -> None:
        """Forget an engine. Requests that only it may run stay here."""
        with self._lock:
            self._engines.pop(engine_index, None)
            self._drop_reservations(engine_index)

    def paused(self, engine_index: int) -> None:
        """Let other engines run what this one would have run. It takes no step."""
        with self._lock:
            self._drop_reservations(engine_index)
        self.wake_all()

    def _drop_reservations(self, engine_index: int) -> None:
        reserved = self._reserved.items()
        self._reserved = {key: by for key, by in reserved if by != engine_index}

    def take_pinned_to(self, engine_index: int) -> list[Request]:
        """Remove and return the requests that only this engine may run."""
        with self._lock:
            alone = [r for r in self._alone.values() if r.pinned_to == engine_index]
            for request in alone:
                del self._alone[request.internal_rid]
            found = [*alone, *self._pinned.pop(engine_index, {}).values()]
        self._notify_taken(found)
        return found

    def put(self, requests: Iterable[Request], *, resumed: bool = False) -> None:
        with self._lock:
            for request in requests:
                self._group_of(request, resumed)[request.internal_rid] = request
        self.wake_all()

    def discard(self, request: Request) -> bool:
        """Remove a request. False if it is not here."""
        with self._lock:
            key = request.internal_rid
            self._reserved.pop(key, None)
            found = any(group.pop(key, None) is not None for group in self._groups())
        self._notify_taken(found)
        if found and request.retracted:
            self.wake_all()  # engines may wait for `has_retracted` or `begun` to change
        return found

    def drain(self) -> list[Request]:
        """Remove and return all requests."""
        with self._lock:
            groups = self._groups()
            self._reserved.clear()
            requests = [request for group in groups for request in group.values()]
            for group in groups:
                group.clear()
        self._notify_taken(requests)
        return requests

    @contextmanager
    def moving(self) -> Iterator[None]:
        """A block in which a thread moves requests from an engine to this queue."""
        with self._arrival:
            self._moving += 1
        try:
            yield
        finally:
            with self._arrival:
                self._moving -= 1
                self._arrival.notify_all()

    def wait_for_arrival(self) -> None:
        """Wait until no thread is inside `moving`."""
        with self._arrival:
            self._arrival.wait_for(lambda: not self._moving)

    def has_retracted(self, engines: Collection[int]) -> bool:
        """Whether a retracted request waits here that one of these engines could take. Requests
        that run or start alone do not count."""
        with self._lock:
            waiting = chain(*(group.values() for group in (self._resumed, *self._pinned.values())))
            return any(r.retracted and self._for_any(r, engines) for r in waiting)

    def wake_all(self) -> None:
        with self._lock:
            wakes = [wake for *_, wake in self._engines.values()]
        for wake in wakes:
            wake()

    def take_begun(self) -> list[Request]:
        """Remove and return every request that has output tokens of this pool."""
        with self._lock:
            requests = [r for group in self._groups() for r in group.values() if r.begun]
            for request in requests:
                self._reserved.pop(request.internal_rid, None)
                for group in self._groups():
                    group.pop(request.internal_rid, None)
        self._notify_taken(requests)
        return requests

    def begun(self, engines: Collection[int]) -> bool:
        """Whether a request with output tokens of this pool waits here that one of these engines
        could take."""
        with self._lock:
            return any(r.begun and self._for_any(r, engines) for r in self._that_resume())

    def waits_for(self, paused: Collection[int], others: Collection[int]) -> bool:
        """Whether a retracted or begun request waits here that one of the `paused` engines could
        take, and none of the `others`."""
        with self._lock:
            return any(
                (request.retracted or request.begun)
                and self._for_any(request, paused)
                and not self._for_any(request, others)
                for request in self._that_resume()
            )

    def _that_resume(self) -> Iterator[Request]:
        """The requests that may have run before."""
        groups = [self._alone, self._resumed, *self._pinned.values()]
        return chain(*(group.values() for group in groups))

    def take(
        self,
        engine_index: int,
        *,
        load: int,
        room: int,
        cached: Callable[[Request], int],
        begun: bool = False,
        prefilling: bool = False,
        may_start: Callable[[Request], bool] = lambda _: True,
    ) -> list[Request]:
        """Remove and return the requests that an engine should run now.

        The engine's thread calls it, so `cached` may read the engine's prefix cache.

        Args:
            load: How many requests the engine holds.
            room: How many more it can run.
            cached: Says how many of a request's first tokens its prefix cache has.
            begun: Take only requests that have output tokens of this pool, because the engine
                drains.
            prefilling: The engine has prompts to prefill already.
            may_start: Says whether the engine can start a request. It is called with the oldest
                request first, and may count what it has allowed.
        """
        if room <= 0 or not len(self):
            return []
        with self._lock:
            taken = None
            if self._alone:
                taken = self._take_alone(engine_index, load, begun, prefilling, may_start)
            if taken is None:
                taken = self._take_some(engine_index, load, room, cached, begun, may_start)
        if any(request.retracted for request in taken):
            self.wake_all()  # other engines may wait for `has_retracted` to change
        self._notify_taken(taken)
        return taken

    def _notify_taken(self, requests: list[Request] | bool) -> None:
        if requests and self.on_taken is not None:
            self.on_taken()

    def _take_some(
        self,
        engine_index: int,
        load: int,
        room: int,
        cached: Callable[[Request], int],
        begun: bool,
        may_start: Callable[[Request], bool],
    ) -> list[Request]:
        pinned = self._pinned.get(engine_index, {})
        waiting = len(pinned) + len(self._resumed) + len(self._fresh)
        free = chain(self._resumed.values(), () if begun else self._fresh.values())
        order = chain(pinned.values(), (r for r in free if self._may_run(r, engine_index)))
        able = (r for r in order if (r.begun or not begun) and may_start(r))
        window = list(islice(able, max(WINDOW, 2 * room)))
        others = [engine for i, engine in self._engines.items() if i != engine_index]
        loads = [held() for condition, held, _ in others if condition.takes(begun=begun)]
        chosen = routing.choose(
            [request.candidate for request in window],
            waiting=waiting,
            load=load,
            loads=[load, *loads],
            room=room,
            cached=lambda i: cached(window[i]),
        )
        if chosen:
            for i in set(range(max(chosen))).difference(chosen):
                window[i].candidate.passed_over += 1
        taken = [window[i] for i in chosen]
        for request in taken:
            for group in (pinned, self._resumed, self._fresh):
                group.pop(request.internal_rid, None)
        return taken

    def _take_alone(
        self,
        engine_index: int,
        load: int,
        begun: bool,
        prefilling: bool,
        may_start: Callable[[Request], bool],
    ) -> list[Request] | None:
        """Take a request that must run or start alone.

        Returns an empty list while the engine must first finish others. Returns None if no such
        request is for this engine.
        """
        for request in self._alone.values():
            key = request.internal_rid
            mine = self._for_any(request, [engine_index]) and (request.begun or not begun)
            if mine and self._reserved.setdefault(key, engine_index) == engine_index:
                if (load if request.faults.runs_alone else prefilling) or not may_start(request):
                    return []
                del self._reserved[key]
                return [self._alone.pop(key)]
        return None

    def _for_any(self, request: Request, engines: Collection[int]) -> bool:
        """Whether one of these engines may run the request."""
        if request.pinned_to is not None:
            return request.pinned_to in engines
        return any(self._may_run(request, engine) for engine in engines)

    def _may_run(self, request: Request, engine_index: int) -> bool:
        return request.faults.may_run_on(engine_index, self._engines.keys())

    def _group_of(self, request: Request, resumed: bool) -> dict[str, Request]:
        if request.faults.runs_alone or request.faults.starts_alone:
            return self._alone
        if request.pinned_to is not None:
            return self._pinned.setdefault(request.pinned_to, {})
        return self._resumed if resumed else self._fresh
