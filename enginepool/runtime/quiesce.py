"""Bringing engines to a standstill at a step boundary, and letting them go on.

Upstream's own pause loses requests after a prefill, its flush refuses after a retract and its
abort may loop for ever; none of them is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Literal, get_args

from enginepool.dispatch.request import Request, aborted
from enginepool.engine.jobs import EngineStopped
from enginepool.engine.single_stepping import one_step_at_a_time
from enginepool.engine.worker import EngineWorker
from enginepool.errors import InvalidRequest, PoolClosed, WeightUpdateFailed
from enginepool.runtime.runtime import Runtime

SwapMode = Literal["drain", "retract", "abort", "in_place"]
SWAP_MODES = get_args(SwapMode)


class Standstill:
    """Engines that stand.

    Attributes:
        workers: Those that are left, in order.
        pauses: Seconds each stood, by engine index; complete once they go on.
    """

    def __init__(self, runtime: Runtime, workers: Sequence[EngineWorker]) -> None:
        self.runtime = runtime
        self.workers = list(workers)
        self.pauses: dict[int, float] = {}

    def run(self, job: Callable[[EngineWorker], Any]) -> dict[int, Any]:
        """Run `job(worker)` on every engine's thread, all at once; results by engine index.

        An engine that has stopped for good drops out; what it had is in the queue. The first
        exception is raised when all have answered.
        """
        futures = [(w, w.channel.run(lambda w=w: job(w))) for w in self.workers]
        return self.collect(futures)

    def collect(self, futures: Sequence[tuple[EngineWorker, Future[Any]]]) -> dict[int, Any]:
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
            raise PoolClosed(f"pool {self.runtime.name!r} was closed")
        if failures:
            raise failures[0]
        if not self.workers:
            if any(worker.condition.returns for worker, _ in futures):
                raise WeightUpdateFailed(
                    "every engine failed meanwhile; they come back with the weights they had, "
                    "try again",
                    engine_index=futures[0][0].index,
                )
            raise self.runtime.dispatch.failure()
        return results


@contextmanager
def standstill(
    runtime: Runtime, workers: Sequence[EngineWorker], mode: SwapMode
) -> Iterator[Standstill]:
    """Stop engines, whatever runs on them; on the way out, also by an error, they go on.

    Args:
        mode: What becomes of running requests. "drain": they finish first. "retract": they go
            back to the queue with the tokens that they have, each at least one more than when it
            was last retracted. "abort": they end with what they have. "in_place": they stay.

    Raises:
        PoolClosed: The pool was closed meanwhile.
        PoolFailed: No engine is left.
    """
    stand, queue = Standstill(runtime, workers), runtime.dispatch.queue
    stopped: dict[int, float] = {}
    taken: list[Request] = []
    waits: list[Future[Any]] = []

    def stop(worker: EngineWorker) -> None:
        worker.pause("swap")
        stopped[worker.index] = time.perf_counter()
        if mode != "in_place":
            taken.extend(worker.channel.retract())

    def due(worker: EngineWorker) -> bool:
        if not worker.condition.may_step:
            return True
        if mode == "drain":
            return not (worker.channel.has_work() or queue.begun())
        return mode != "retract" or (worker.channel.progressed() and not queue.has_retracted())

    def wait_until_due() -> None:
        futures = []
        # One engine has nobody to wait for, and a drain ends with nothing on its way.
        several = mode != "drain" and len(workers) > 1
        with one_step_at_a_time([w.channel.single_stepping for w in stand.workers if several]):
            for worker in stand.workers:
                # Drained engines wait for their siblings with nothing to do, so they stop last.
                job = _nothing if mode == "drain" else (lambda worker=worker: stop(worker))
                future = worker.channel.run_when(lambda worker=worker: due(worker), job)
                waits.append(future)
                futures.append((worker, future))
            stand.collect(futures)

    try:
        if mode == "drain":
            _drain(runtime, stand)
        wait_until_due()
        if mode == "drain":
            # Of an engine that failed when its siblings were due, one of which may have taken it.
            while _unfinished(stand):
                wait_until_due()
            stand.run(stop)
        if mode == "abort":
            # Those of an engine that failed are in the queue.
            for request in (*taken, *queue.take_begun()):
                request.call.finish(request, aborted("update_weights(mode='abort')", "cancelled"))
        yield stand
    finally:
        for future in waits:
            future.cancel()
        _go_on(runtime, stand, stopped, taken if mode != "abort" else [])


def pause_drained(runtime: Runtime) -> None:
    """Pause all engines once running requests have finished; those that wait go on waiting."""
    with (
        runtime.steering.turn("pause_generation()"),
        standstill(runtime, runtime.reachable(), "drain") as stand,
    ):
        runtime.desired.pause_reasons.add("paused")
        stand.run(lambda worker: worker.pause("paused"))


def _go_on(
    runtime: Runtime, stand: Standstill, stopped: dict[int, float], taken: list[Request]
) -> None:
    def go(worker: EngineWorker) -> None:
        worker.go_on("swap")
        worker.drain(False)
        if (since := stopped.get(worker.index)) is not None:
            stand.pauses[worker.index] = time.perf_counter() - since

    # Before the engines go on: what they had comes first.
    runtime.dispatch.resume(taken)
    futures = [(w, w.channel.run(lambda w=w: go(w))) for w in stand.workers]
    for _, future in futures:
        try:
            future.result()
        except EngineStopped:
            continue  # it has left; its requests went to its siblings


def _drain(runtime: Runtime, stand: Standstill) -> None:
    """From here on engines only finish what they have begun; refused if some of it cannot finish.

    Nothing is paused meanwhile: that takes `runtime.steering` too.
    """

    def begin(worker: EngineWorker) -> tuple[bool, bool]:
        worker.drain(True)
        return worker.condition.paused, worker.channel.load() > 0

    found = stand.run(begin)
    stopped = {index for index, (paused, _) in found.items() if paused}
    holding = any(paused and held for paused, held in found.values())
    if holding or runtime.dispatch.queue.waits_for(
        stopped, all_there_are=len(stopped) == len(found)
    ):
        raise InvalidRequest(
            f"mode='drain' waits for running outputs, but engine {min(stopped)} is paused or "
            "without its KV cache; continue_generation() or resume_memory_occupation() first, or "
            "use another mode"
        )


def _unfinished(stand: Standstill) -> bool:
    """Whether these engines have something begun, or could take it."""
    able = [worker for worker in stand.workers if worker.condition.may_step]
    begun = stand.runtime.dispatch.queue.begun()
    return any(begun or worker.channel.load() for worker in able)


def _nothing() -> None:
    """Only the moment counts."""
