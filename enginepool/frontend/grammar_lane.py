"""The threads that compile a pool's grammars, each grammar after a trial in another process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from enginepool.dispatch.grammar import STACK_BYTES, Grammar, GrammarSource
from enginepool.frontend.grammar_helper import GrammarHelper, TookTooLong

_ENDS_SECONDS = 10.0
_starting = threading.Lock()


class Job:
    """A grammar that callers wait for.

    Attributes:
        waiting: How many callers wait.
    """

    def __init__(self, source: GrammarSource) -> None:
        self.source = source
        self.done: Future[Grammar] = Future()
        self.waiting = 0


class Lane:
    """One thread and one helper process. They compile grammars in the order of arrival.

    A grammar that takes longer than this lane allows goes to the next lane, so that it delays no
    other grammar here.
    """

    def __init__(
        self,
        name: str,
        helper: GrammarHelper,
        compile_tried: Callable[[dict[str, Any]], Grammar],
        then: Lane | None = None,
    ) -> None:
        """
        Args:
            compile_tried: Makes a grammar from its trial's answer.
        """
        self._helper, self._compile_tried, self._then = helper, compile_tried, then
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # The stack size is process-wide: other threads that start meanwhile get it too
        with _starting:
            size = threading.stack_size(4 * STACK_BYTES)
            try:
                self._thread.start()
            finally:
                threading.stack_size(size)

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """End the lane. Its current grammar gets no result."""
        self._helper.close()
        self._jobs.put(None)
        self._thread.join(_ENDS_SECONDS)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._compile(job)
            del job
            if self._then is None and self._jobs.empty():
                self._helper.end()  # the last lane's process is seldom needed
        self._helper.end()

    def _compile(self, job: Job) -> None:
        try:
            answer = self._helper.try_out(job.source, lambda: not job.waiting)
            job.done.set_result(self._compile_tried(answer))
        except TookTooLong as error:
            if self._then is None:
                job.done.set_exception(error)
            else:
                self._then.put(job)
        except BaseException as error:
            job.done.set_exception(error)
