"""Threads on which a pool's grammars are compiled, each after a trial in a process of its own."""

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
    """A grammar that somebody waits for.

    Attributes:
        waiting: How many do.
    """

    def __init__(self, source: GrammarSource) -> None:
        self.source = source
        self.done: Future[Grammar] = Future()
        self.waiting = 0


class Lane:
    """One thread and one helper: grammars are compiled in the order in which they come.

    What takes longer than this lane gives it goes on to the next, and is in nobody's way here.
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
            compile_tried: Makes a grammar of what its trial says.
        """
        self._helper, self._compile_tried, self._then = helper, compile_tried, then
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        with _starting:  # for a moment it is the size of the host's new threads, too
            size = threading.stack_size(4 * STACK_BYTES)
            try:
                self._thread.start()
            finally:
                threading.stack_size(size)

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """What it is at ends without a result."""
        self._helper.close()
        self._jobs.put(None)
        self._thread.join(_ENDS_SECONDS)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._compile(job)
            del job
            if self._then is None and self._jobs.empty():
                self._helper.end()  # the last lane's is seldom needed
        self._helper.end()

    def _compile(self, job: Job) -> None:
        try:
            said = self._helper.try_out(job.source, lambda: not job.waiting)
            job.done.set_result(self._compile_tried(said))
        except TookTooLong as error:
            if self._then is None:
                job.done.set_exception(error)
            else:
                self._then.put(job)
        except BaseException as error:
            job.done.set_exception(error)
