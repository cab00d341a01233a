"""Jobs: what other threads ask an engine to do at its next step boundary."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

T = TypeVar("T")


class StopEngine(BaseException):
    """Ends an engine's loop. Not an `Exception`: upstream catches those."""


def stop_engine() -> None:
    """The job that ends an engine's loop."""
    raise StopEngine


class EngineStopped(Exception):
    """A job could not run, because the engine has stopped or failed."""


class EngineBroken(EngineStopped):
    """A job has left the engine unusable. The engine's loop ends with this error."""


class Jobs:
    """Added by any thread, run by the engine's own thread in `run_due`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._jobs: deque[tuple[Callable[[], object], Future]] = deque()
        self._waiting: list[tuple[Callable[[], bool], Callable[[], object], Future]] = []
        self._running: Future | None = None
        self._broken: tuple[Future, EngineBroken] | None = None  # not answered yet
        self._closed: str | None = None
        self._lock = threading.Lock()

    def add(self, job: Callable[[], T]) -> Future[T]:
        """Run `job` at the next step boundary.

        The future fails with `EngineStopped` if the engine stops before the job runs.
        """
        return self._add(job, None)

    def add_when(self, condition: Callable[[], bool], job: Callable[[], T]) -> Future[T]:
        """Run `job` at the first step boundary at which `condition` holds; see `add`.

        An idle engine checks the condition again when it is woken.
        """
        return self._add(job, condition)

    def _add(self, job: Callable[[], T], condition: Callable[[], bool] | None) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._closed is not None:
                future.set_exception(EngineStopped(self._closed))
            elif condition is None:
                self._jobs.append((job, future))
            else:
                self._waiting.append((condition, job, future))
        self._wake()
        return future

    def open(self) -> None:
        """Take jobs again after `close`."""
        with self._lock:
            self._closed = None

    def close(self, why: str, *, last: Callable[[], object] | None = None) -> None:
        """Take no more jobs, except `last`. Jobs that wait fail. With `last`, the running job fails
        too."""
        with self._lock:
            self._closed = why
            futures = [future for *_, future in (*self._jobs, *self._waiting)]
            self._jobs.clear()
            self._waiting.clear()
            if last is not None:
                self._jobs.append((last, Future()))
                futures += [] if self._running is None else [self._running]
        self._answer_broken()
        for future in futures:
            _answer(future, EngineStopped(why))

    # The engine's thread

    def due(self) -> bool:
        """Whether `run_due` would run a job."""
        return bool(self._jobs or self._broken) or self._ready() is not None

    def run_due(self) -> None:
        """Run every job that is due, and every job that becomes due meanwhile.

        Raises:
            StopEngine, EngineBroken: A job ended the loop.
        """
        # The engine was broken and had lost shared weights, so it was unloaded, and not closed.
        self._answer_broken()
        # One at a time: a job may change what others wait for.
        while (job := self._take()) is not None:
            self._run(*job)

    def _ready(self) -> tuple[Callable[[], bool], Callable[[], object], Future] | None:
        """A job whose condition holds."""
        return next((entry for entry in list(self._waiting) if entry[0]()), None)

    def _take(self) -> tuple[Callable[[], object], Future] | None:
        ready = None if self._jobs else self._ready()
        with self._lock:  # another thread may have closed the engine meanwhile
            if self._jobs:
                job, future = self._jobs.popleft()
            elif ready is not None and ready in self._waiting:
                self._waiting.remove(ready)
                _, job, future = ready
            else:
                return None
            self._running = future
            return job, future

    def _run(self, job: Callable[[], object], future: Future) -> None:
        try:
            _answer(future, job())
        except StopEngine:
            _answer(future, None)
            raise
        except EngineBroken as error:
            # Answered by `close`, so that whoever waits finds an engine that has failed.
            self._broken = future, error
            raise
        except Exception as error:
            _answer(future, error)
        finally:
            self._running = None

    def _answer_broken(self) -> None:
        broken, self._broken = self._broken, None
        if broken is not None:
            _answer(*broken)


def _answer(future: Future, answer: object) -> None:
    with contextlib.suppress(InvalidStateError):  # `close` has already answered
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
