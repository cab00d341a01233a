"""How a caller submits a call and waits for it: in a thread, or on an event loop."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import anyio
from anyio.lowlevel import current_token

from enginepool.dispatch.dispatch import Dispatch
from enginepool.dispatch.request import Call, Request
from enginepool.errors import PoolClosed
from enginepool.process.forks import rest_if_python_ends

# How long a request that timed out may take to return its tokens. Its engine ends it at the next
# step boundary, unless a step is stuck.
GRACE_SECONDS = 10.0
_TICK_SECONDS = 0.1


class LoopSignal:
    """Wakes a task on the event loop (asyncio or trio) that made it. `set` never blocks."""

    def __init__(self) -> None:
        native: Any = current_token().native_token
        self._schedule: Callable[[Callable[[], None]], Any] = (
            getattr(native, "call_soon_threadsafe", None) or native.run_sync_soon
        )
        self._event = anyio.Event()
        self._pending = False

    def set(self) -> None:
        if self._pending:  # one wake-up is enough until the waiter takes it
            return
        self._pending = True
        # A closed loop (trio's RunFinishedError is a RuntimeError) has no waiter.
        with contextlib.suppress(RuntimeError):
            self._schedule(lambda: self._event.set())

    async def wait(self, timeout: float | None) -> bool:
        """Sleep until `set` was called since the last wait; False after `timeout` seconds."""
        with anyio.move_on_after(timeout):
            await self._event.wait()
            self._event = anyio.Event()
            self._pending = False
            return True
        return False


@contextlib.contextmanager
def submitted(dispatch: Dispatch, call: Call) -> Iterator[None]:
    """Submit a call, and run the block that waits for it.

    If the caller leaves the block early (cancelled, interrupted, iterator closed), the call's
    requests end inside the engines.

    Raises:
        EnginePoolError: What `Dispatch.submit` raises.
    """
    try:
        dispatch.submit(call)
        yield
    except GeneratorExit:
        # The garbage collector may close the iterator on a thread that holds a lock of `abort`.
        with contextlib.suppress(RuntimeError):  # no new threads while Python ends
            threading.Thread(target=_leave, args=(dispatch, call), daemon=True).start()
        raise
    except BaseException:
        _leave(dispatch, call)
        raise


def _leave(dispatch: Dispatch, call: Call) -> None:
    if dispatch.process.here:
        dispatch.abort(call.requests, "the caller left", "cancelled")


@dataclass(slots=True)
class Chunk:
    """A snapshot of a request's output. `final`: the request has ended."""

    request: Request
    output_ids: list[int]
    logprobs: list[float]
    final: bool


def wait_all(
    dispatch: Dispatch, call: Call, timeout: float | None, tick: Callable[[], None] | None = None
) -> None:
    """Wait until all requests of a submitted call have ended.

    Args:
        tick: Called about ten times a second while waiting.
    """
    signal = threading.Event()
    call.listen(signal, every=False)
    deadline = _Deadline(dispatch, call, timeout)
    while not call.done:
        left = deadline.left()
        pause = left if tick is None else min(_TICK_SECONDS, left or _TICK_SECONDS)
        if not signal.wait(pause):
            deadline.check()
        signal.clear()
        if tick is not None:
            tick()
    _rest_if_closed(call)


async def async_wait_all(dispatch: Dispatch, call: Call, timeout: float | None) -> None:
    """`wait_all` for a task."""
    signal = LoopSignal()
    call.listen(signal, every=False)
    deadline = _Deadline(dispatch, call, timeout)
    while not call.done:
        if not await signal.wait(deadline.left()):
            deadline.check()


def chunks(dispatch: Dispatch, call: Call, timeout: float | None) -> Iterator[Chunk]:
    """Yield each request of a submitted call when it ends, and snapshots of streamed requests."""
    signal = threading.Event()
    call.listen(signal, every=True)
    deadline, seen = _Deadline(dispatch, call, timeout), _Seen(call)
    while not seen.all:
        for chunk in seen.news():
            yield chunk
            dispatch.process.check()  # the reader may have forked
        if not seen.all:
            dispatch.refuse_to_wait(call)
            signal.wait(deadline.left())
            signal.clear()
            deadline.check()
    _rest_if_closed(call)


async def async_chunks(
    dispatch: Dispatch, call: Call, timeout: float | None
) -> AsyncIterator[Chunk]:
    """`chunks` for a task."""
    signal = LoopSignal()
    call.listen(signal, every=True)
    deadline, seen = _Deadline(dispatch, call, timeout), _Seen(call)
    while not seen.all:
        for chunk in seen.news():
            yield chunk
            dispatch.process.check()
        if not seen.all:
            await signal.wait(deadline.left())
            deadline.check()


class _Seen:
    """The outputs that the reader of a call has got so far."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._ended: set[int] = set()
        self._lengths = [0] * len(call.requests)
        self._streamed = [request for request in call.requests if request.stream]

    @property
    def all(self) -> bool:
        return len(self._ended) == len(self._call.requests)

    def news(self) -> Iterator[Chunk]:
        for request in self._streamed:
            snapshot = request.snapshot
            if snapshot is None or request.position in self._ended:
                continue
            if len(snapshot[0]) > self._lengths[request.position]:
                self._lengths[request.position] = len(snapshot[0])
                yield Chunk(request, list(snapshot[0]), snapshot[1], final=False)
        while self._call.finished:
            request = self._call.finished.popleft()
            self._ended.add(request.position)
            yield Chunk(request, list(request.output_ids), request.logprobs, final=True)


class _Deadline:
    """Ends a call's requests at its timeout. An engine then has GRACE_SECONDS to return tokens."""

    def __init__(self, dispatch: Dispatch, call: Call, timeout: float | None) -> None:
        self._dispatch, self._call, self._timeout = dispatch, call, timeout
        self._at = None if timeout is None else time.monotonic() + timeout
        self._aborted = False

    def left(self) -> float | None:
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def check(self) -> None:
        if self._at is None or time.monotonic() < self._at:
            return
        if not self._aborted:
            self._aborted = True
            self._at = time.monotonic() + GRACE_SECONDS
            self._dispatch.abort(
                self._call.requests,
                f"not finished within timeout={self._timeout} seconds",
                "timeout",
            )
            return
        for request in self._call.requests:
            if request.finish_reason is None and request.abort_reason is not None:
                self._call.finish(request, request.abort_reason)


def _rest_if_closed(call: Call) -> None:
    if isinstance(call.failure, PoolClosed):
        rest_if_python_ends()
