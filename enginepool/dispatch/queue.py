"""The pool's queue: requests that no engine holds yet. Engines pull from it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice

from enginepool.dispatch import routing
from enginepool.dispatch.request import Request

# How many of the oldest requests an engine looks at for affinity, at the least.
WINDOW = 64


class RequestQueue:
    """Waiting requests, oldest first; those that resume go before the rest.

    Thread-safe. `wake` callables are called outside the lock.

    Attributes:
        on_taken: Called whenever requests have left, outside the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Dictionaries keep insertion order and remove in constant time.
        self._resumed: dict[str, Request] = {}
        self._fresh: dict[str, Request] = {}
        self._pinned: dict[int, dict[str, Request]] = {}
        self._alone: dict[str, Request] = {}
        self._reserved: dict[str, int] = {}  # the engine that empties itself for one of `_alone`
        self._engines: dict[int, tuple[Callable[[], int], Callable[[], None]]] = {}
        self._arrival = threading.Condition()
        self._moving = 0
        self.on_taken: Callable[[], None] | None = None

    def __len__(self) -> int:
        return sum(map(len, self._groups()))

    def _groups(self) -> list[dict[str, Request]]:
        return [self._alone, self._resumed, self._fresh, *self._pinned.values()]

    def attach(self, engine_index: int, load: Callable[[], int], wake: Callable[[], None]) -> None:
        """Register a serving engine: how many requests it holds, and how to wake it.

        It is to call `take` right after.
        """
        with self._lock:
            self._engines[engine_index] = (load, wake)
            # A request that is to run alone and failed on all engines there were is for this one
            # now; the one that empties itself for it would not take it, and keep it from this one.
            self._reserved.clear()

    def detach(self, engine_index: int) -> None:
        """Forget an engine; what only it may run waits until it is back, or is taken out."""
        with self._lock:
            self._engines.pop(engine_index, None)
            reserved = self._reserved.items()
            self._reserved = {key: by for key, by in reserved if by != engine_index}

    def take_pinned_to(self, engine_index: int) -> list[Request]:
        """Take out what only this engine may run: it does not come back."""
        with self._lock:
            alone = [r for r in self._alone.values() if r.pinned_to == engine_index]
            for request in alone:
                del self._alone[request.internal_rid]
            found = [*alone, *self._pinned.pop(engine_index, {}).values()]
        self._left(found)
        return found

    def put(self, requests: Iterable[Request], *, resumed: bool = False) -> None:
        with self._lock:
            for request in requests:
                self._group_of(request, resumed)[request.internal_rid] = request
        self.wake_all()

    def discard(self, request: Request) -> bool:
        """Take a request out; False when no engine could get it from here any more."""
        with self._lock:
            key = request.internal_rid
            self._reserved.pop(key, None)
            found = any(group.pop(key, None) is not None for group in self._groups())
        self._left(found)
        if found and request.retracted:
            self.wake_all()  # engines may wait for `has_retracted` or `begun`
        return found

    def drain(self) -> list[Request]:
        """Take everything out."""
        with self._lock:
            groups = self._groups()
            self._reserved.clear()
            requests = [request for group in groups for request in group.values()]
            for group in groups:
                group.clear()
        return requests

    @contextmanager
    def moving(self) -> Iterator[None]:
        """While a thread brings requests here that an engine has lost."""
        with self._arrival:
            self._moving += 1
        try:
            yield
        finally:
            with self._arrival:
                self._moving -= 1
                self._arrival.notify_all()

    def wait_for_arrival(self) -> None:
        """Wait until no request is on its way here."""
        with self._arrival:
            self._arrival.wait_for(lambda: not self._moving)

    def has_retracted(self) -> bool:
        """Whether a request that was retracted from an engine still waits here."""
        with self._lock:
            groups = [self._resumed, *self._pinned.values()]
            return any(r.retracted for group in groups for r in group.values())

    def wake_all(self) -> None:
        with self._lock:
            wakes = [wake for _, wake in self._engines.values()]
        for wake in wakes:
            wake()

    def take_begun(self) -> list[Request]:
        """Take out every request that has outputs of ours."""
        with self._lock:
            requests = [r for group in self._groups() for r in group.values() if r.begun]
            for request in requests:
                self._reserved.pop(request.internal_rid, None)
                for group in self._groups():
                    group.pop(request.internal_rid, None)
        self._left(requests)
        return requests

    def begun(self) -> bool:
        """Whether one that has outputs of ours waits here for an engine that could take it."""
        with self._lock:
            pinned = [group for index, group in self._pinned.items() if index in self._engines]
            groups = [self._alone, self._resumed, *pinned]
            return any(r.begun for group in groups for r in group.values())

    def waits_for(self, engines: Collection[int], *, all_there_are: bool) -> bool:
        """Whether a request that was in an engine waits here and only `engines` may take it."""
        with self._lock:
            groups = [self._alone, self._resumed, *self._pinned.values()]
            return any(
                (request.retracted or request.begun)
                and ((all_there_are and bool(engines)) or request.pinned_to in engines)
                for group in groups
                for request in group.values()
            )

    def take(
        self,
        engine_index: int,
        *,
        load: int,
        room: int,
        cached: Callable[[Request], int],
        begun: bool = False,
        prefilling: bool = False,
    ) -> list[Request]:
        """Hand an engine the requests that it should run now.

        Called on the engine's thread, which may look at its own prefix cache in `cached`.

        Args:
            begun: Only those that have outputs of ours; for an engine that drains.
            prefilling: The engine has prompts to compute already.
        """
        if room <= 0 or not len(self):
            return []
        with self._lock:
            taken = None
            if self._alone:
                taken = self._take_alone(engine_index, load, begun, prefilling)
            if taken is None:
                taken = self._take_some(engine_index, load, room, cached, begun)
        if any(request.retracted for request in taken):
            self.wake_all()  # siblings may wait for `has_retracted`
        self._left(taken)
        return taken

    def _left(self, requests: list[Request] | bool) -> None:
        if requests and self.on_taken is not None:
            self.on_taken()

    def _take_some(
        self,
        engine_index: int,
        load: int,
        room: int,
        cached: Callable[[Request], int],
        begun: bool,
    ) -> list[Request]:
        pinned = self._pinned.get(engine_index, {})
        waiting = len(pinned) + len(self._resumed) + len(self._fresh)
        free = chain(self._resumed.values(), () if begun else self._fresh.values())
        order = chain(pinned.values(), (r for r in free if self._may_run(r, engine_index)))
        may_start = (r for r in order if r.begun or not begun)
        window = list(islice(may_start, max(WINDOW, 2 * room)))
        loads = [load if i == engine_index else other() for i, (other, _) in self._engines.items()]
        chosen = routing.choose(
            [request.candidate for request in window],
            waiting=waiting,
            load=load,
            loads=loads,
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
        self, engine_index: int, load: int, begun: bool, prefilling: bool
    ) -> list[Request] | None:
        """A request that is to run or to start with nothing beside it; none yet while the engine
        has others; None if no such request is for this engine."""
        for request in self._alone.values():
            key = request.internal_rid
            mine = request.pinned_to == engine_index
            if request.pinned_to is None:
                mine = self._may_run(request, engine_index)
            mine = mine and bool(request.begun or not begun)
            if mine and self._reserved.setdefault(key, engine_index) == engine_index:
                if load if request.faults.runs_alone else prefilling:
                    return []
                del self._reserved[key]
                return [self._alone.pop(key)]
        return None

    def _may_run(self, request: Request, engine_index: int) -> bool:
        return request.faults.may_run_on(engine_index, self._engines.keys())

    def _group_of(self, request: Request, resumed: bool) -> dict[str, Request]:
        if request.faults.runs_alone or request.faults.starts_alone:
            return self._alone
        if request.pinned_to is not None:
            return self._pinned.setdefault(request.pinned_to, {})
        return self._resumed if resumed else self._fresh
