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
        future: Future[T] = Future()
        with self._lock:
            if self._closed is None:
                self._jobs.append((job, future))
            else:
                future.set_exception(EngineStopped(self._closed))
        self._wake()
        return future

    def add_when(self, condition: Callable[[], bool], job: Callable[[], T]) -> Future[T]:
        """Run `job` at the first step boundary at which `condition` holds; see `add`.

        An idle engine checks the condition again when it is woken.
        """
        future: Future[T] = Future()

        def listed(adding: Future[None]) -> None:
            error = adding.exception()
            if error is not None and future.set_running_or_notify_cancel():
                future.set_exception(error)

        add = self.add(lambda: self._waiting.append((condition, job, future)))
        add.add_done_callback(listed)
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
            jobs, self._jobs = self._jobs, deque()
            if last is not None:
                self._jobs.append((last, Future()))
        self._answer_broken()
        waiting, self._waiting = self._waiting, []
        for future in [future for *_, future in (*jobs, *waiting)]:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineStopped(why))
        if last is not None and (running := self._running) is not None:
            _answer(running, EngineStopped(why))

    # The engine's thread

    def due(self) -> bool:
        """Whether `run_due` would run a job."""
        return bool(self._jobs or self._broken) or any(
            future.cancelled() or condition() for condition, _, future in self._waiting
        )

    def run_due(self) -> None:
        """Run every job that is due, and every job that becomes due meanwhile.

        Raises:
            StopEngine, EngineBroken: A job ended the loop.
        """
        self._answer_broken()  # the engine has lost shared weights as well, and goes on without
        while True:
            while self._jobs:
                self._run(*self._jobs.popleft())
            if not self._run_one_waiting():
                return

    def _run_one_waiting(self) -> bool:
        # One at a time: a job may change what others wait for.
        for entry in self._waiting:
            condition, job, future = entry
            if future.cancelled() or condition():
                self._waiting.remove(entry)
                self._run(job, future)
                return True
        return False

    def _run(self, job: Callable[[], object], future: Future) -> None:
        if not future.set_running_or_notify_cancel():
            return
        self._running = future
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
