"""Stops engines at a step boundary, and lets them go on.

Upstream's own calls are not used. Its pause loses requests after a prefill. Its flush refuses after
a retract. Its abort may loop for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Literal, TypeVar, get_args

from enginepool.dispatch.request import Request, aborted
from enginepool.engine.jobs import EngineStopped
from enginepool.engine.single_stepping import one_step_at_a_time
from enginepool.engine.worker import EngineWorker
from enginepool.errors import InvalidRequest
from enginepool.runtime.runtime import Runtime

SwapMode = Literal["drain", "retract", "abort", "in_place"]
SWAP_MODES = get_args(SwapMode)

T = TypeVar("T")


class EngineGroup:
    """Engines that run jobs together. Inside `quiesced` they are stopped at a step boundary.

    Attributes:
        workers: The engines that have not failed since, in order.
        pauses: How many seconds each was stopped, by engine index; complete once they go on.
    """

    def __init__(self, runtime: Runtime, workers: Sequence[EngineWorker]) -> None:
        self.runtime = runtime
        self.workers = list(workers)
        self.pauses: dict[int, float] = {}

    def run(self, job: Callable[[EngineWorker], T]) -> dict[int, T]:
        """Run `job(worker)` on the threads of all engines at once. Returns results by engine index.

        A failed engine drops out; its requests are in the queue. The first exception is raised
        when all engines have answered.
        """
        futures = [(w, w.channel.run(lambda w=w: job(w))) for w in self.workers]
        return self.collect(futures)

    def collect(self, futures: Sequence[tuple[EngineWorker, Future[T]]]) -> dict[int, T]:
        results, failures, before = {}, [], len(self.workers)
        for worker, future in futures:
            try:
                results[worker.index] = future.result()
            except EngineStopped:
                self.workers.remove(worker)
            except Exception as error:
                failures.append(error)
        if len(self.workers) < before:
            self.runtime.dispatch.queue.wait_for_arrival()
        if self.runtime.closed:
            raise self.runtime.failure()
        if failures:
            raise failures[0]
        if not self.workers and (futures or not self.runtime.reachable()):
            raise self.runtime.failure([worker for worker, _ in futures])
        return results

    def able(self) -> list[int]:
        """The indices of the engines that take requests until they stop. Any thread."""
        conditions = [(worker.index, worker.condition) for worker in tuple(self.workers)]
        return [index for index, one in conditions if one.reachable and one.may_step]


@contextmanager
def quiesced(
    runtime: Runtime, workers: Sequence[EngineWorker], mode: SwapMode
) -> Iterator[EngineGroup]:
    """Stop engines at a step boundary inside the block. They go on when it ends, even by an error.

    Args:
        mode: What happens to running requests. "drain": they finish first. "retract": they go
            back to the queue with the tokens that they have. An engine stops only when each has
            gained a token since it was last retracted. "abort": they end with the tokens that they
            have. "in_place": they stay.

    Raises:
        PoolClosed: The pool was closed meanwhile.
        PoolFailed: No engine is left.
    """
    engines = EngineGroup(runtime, workers)
    stop = _Stop(engines, mode)
    try:
        stop.run()
        yield engines
    finally:
        stop.undo()


def pause_drained(runtime: Runtime) -> None:
    """Pause all engines once running requests have finished; those that wait go on waiting."""
    with (
        runtime.steering.hold("pause_generation()"),
        quiesced(runtime, runtime.reachable(), "drain") as engines,
    ):
        runtime.desired.pause_reasons.add("paused")
        engines.run(lambda worker: worker.pause("paused"))


class _Stop:
    """Stops engines in one of the modes, and undoes that."""

    def __init__(self, engines: EngineGroup, mode: SwapMode) -> None:
        self._engines, self._mode = engines, mode
        self._queue = engines.runtime.dispatch.queue
        # A single engine waits for no other engine. After a drain no step is in flight. Neither
        # needs single steps.
        self._single_stepping = mode != "drain" and len(engines.workers) > 1
        self._stopped_at: dict[int, float] = {}
        self._taken: list[Request] = []
        self._over = False

    def run(self) -> None:
        if self._mode == "drain":
            _begin_drain(self._engines)
        self._wait_until_due()
        if self._mode == "drain":
            # After an engine has drained, it may still take over requests of an engine that failed.
            # Then it must drain again.
            while _unfinished(self._engines):
                self._wait_until_due()
            self._engines.run(self._stop)
        if self._mode == "abort":
            # The queue has the requests that a failed engine had begun.
            self._taken += self._queue.take_begun()
            while self._taken:
                request = self._taken.pop(0)
                reason = aborted("an update of weights with mode='abort'", "cancelled")
                request.call.finish(request, reason)

    def undo(self) -> None:
        self._over = True  # an engine that has not stopped yet stops no more
        # Queue the retracted requests before the engines go on, so that they run first.
        self._resume()
        futures = [w.channel.run(lambda w=w: self._go_on(w)) for w in self._engines.workers]
        for future in futures:
            try:
                future.result()
            except EngineStopped:
                continue  # it has failed; its requests went to other engines
        self._resume()  # Control-C may have come while an engine was about to stop

    def _resume(self) -> None:
        taken = [self._taken.pop(0) for _ in range(len(self._taken))]
        self._engines.runtime.dispatch.resume(taken)

    def _wait_until_due(self) -> None:
        workers = self._engines.workers
        futures = []
        stepping = [w.channel.single_stepping for w in workers if self._single_stepping]
        with one_step_at_a_time(stepping):
            for worker in workers:
                # A drained engine idles. Once all are drained, `run` stops them together.
                job = _nothing if self._mode == "drain" else partial(self._stop, worker)
                due = partial(self._due, worker)
                futures.append((worker, worker.channel.run_when(due, job)))
            self._engines.collect(futures)

    def _due(self, worker: EngineWorker) -> bool:
        """Whether the engine may stop at this step boundary. Runs on its thread."""
        if self._over or not worker.condition.may_step:
            return True
        if self._mode == "drain":
            return not (worker.channel.has_work() or self._queue.begun(self._engines.able()))
        if self._mode == "retract":
            waits = self._queue.has_retracted(self._engines.able())
            return worker.channel.running.progressed() and not waits
        return True

    def _stop(self, worker: EngineWorker) -> None:
        """Runs on the engine's thread, as `_go_on` does."""
        if self._over:
            return
        worker.pause("swap")
        self._stopped_at[worker.index] = time.perf_counter()
        if self._mode != "in_place":
            self._taken.extend(worker.channel.retract())

    def _go_on(self, worker: EngineWorker) -> None:
        worker.go_on("swap")
        worker.drain(False)
        if (since := self._stopped_at.get(worker.index)) is not None:
            self._engines.pauses[worker.index] = time.perf_counter() - since


def _begin_drain(engines: EngineGroup) -> None:
    """Make engines finish the requests that they have begun, and begin no others. No pause can come
    in between, because it needs `runtime.steering` too.

    Raises:
        InvalidRequest: A request cannot finish because its engine is paused. It may be an engine
            whose turn comes later, in a rolling update.
    """
    engines.run(lambda worker: worker.drain(True))
    runtime = engines.runtime
    serving = runtime.reachable()
    paused = [worker.index for worker in serving if worker.condition.paused]
    others = [worker.index for worker in serving if worker.condition.may_step]
    holding = any(runtime.workers[index].channel.running.unfinished for index in paused)
    if holding or runtime.dispatch.queue.waits_for(paused, others):
        raise InvalidRequest(
            f"mode='drain' waits for running outputs, but engine {min(paused)} is paused or "
            "without its KV cache; continue_generation() or resume_memory_occupation() first, or "
            "use another mode"
        )


def _unfinished(engines: EngineGroup) -> bool:
    """Whether these engines have requests, or can take begun ones from the queue."""
    able = engines.able()
    begun = engines.runtime.dispatch.queue.begun(able)
    return any(begun or w.channel.has_requests() for w in engines.workers if w.index in able)


def _nothing() -> None:
    """A job that does nothing. When it runs, the engine has reached a step boundary."""
