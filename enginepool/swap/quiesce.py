"""Bringing engines to a standstill at a step boundary, and letting them go on.

Upstream's own pause loses requests after a prefill, its flush refuses after a retract and its
abort may loop for ever; none of them is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Literal

from enginepool.engine.channel import Channel
from enginepool.engine.jobs import EngineStopped
from enginepool.engine.worker import EngineWorker
from enginepool.errors import InvalidRequest, PoolClosed, WeightUpdateFailed
from enginepool.requests.request import Request, aborted
from enginepool.runtime.runtime import Runtime

SwapMode = Literal["drain", "retract", "abort", "in_place"]
MODES = ("drain", "retract", "abort", "in_place")
_STOP = "swap"


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
            self.runtime.queue.wait_for_arrival()
        if self.runtime.closed:
            raise PoolClosed(f"pool {self.runtime.name!r} was closed")
        if failures:
            raise failures[0]
        if not self.workers:
            if any(worker.recovering for worker, _ in futures):
                raise WeightUpdateFailed(
                    "every engine failed meanwhile; they come back with the weights they had, "
                    "try again",
                    engine_index=futures[0][0].index,
                )
            raise self.runtime.failure()
        return results


@contextmanager
def standstill(
    runtime: Runtime, workers: Sequence[EngineWorker], mode: SwapMode
) -> Iterator[Standstill]:
    """Stop engines, whatever runs on them; on the way out, also by an error, they go on.

    Args:
        mode: What becomes of running requests. "drain": they finish first. "retract": they go
            back to the queue with the tokens that they have, each at least one more than when it
            was last taken back. "abort": they end with what they have. "in_place": they stay.

    Raises:
        PoolClosed: The pool was closed meanwhile.
        PoolFailed: No engine is left.
    """
    stand = Standstill(runtime, workers)
    stopped: dict[int, float] = {}
    taken: list[Request] = []
    waits: list[Future[Any]] = []

    def stop(channel: Channel) -> None:
        channel.stops.add(_STOP)
        stopped[channel.engine_index] = time.perf_counter()
        if mode != "in_place":
            taken.extend(channel.take_back())

    def due(channel: Channel) -> bool:
        if not _may_step(channel):
            return True
        if mode == "drain":
            return not (channel.books.held or _has_work(channel) or runtime.queue.begun())
        return mode != "retract" or (channel.books.progressed() and not runtime.queue.owes())

    def wait_until_due() -> None:
        futures = []
        for worker in stand.workers:
            channel = worker.channel
            # Drained engines wait for their siblings with nothing to do, so they stop last.
            job = _nothing if mode == "drain" else (lambda channel=channel: stop(channel))
            future = channel.run_when(lambda channel=channel: due(channel), job)
            waits.append(future)
            futures.append((worker, future))
        stand.collect(futures)

    try:
        if mode == "drain":
            _drain(runtime, stand)
        wait_until_due()
        if mode == "drain":
            # Of an engine that failed when its siblings were due.
            while runtime.queue.begun() and any(_may_step(w.channel) for w in stand.workers):
                wait_until_due()
            stand.run(lambda worker: stop(worker.channel))
        _settle(runtime, taken, mode)
        yield stand
    finally:
        for future in waits:
            future.cancel()
        _go_on(runtime, stand, stopped, taken if mode != "abort" else [])


def _settle(runtime: Runtime, taken: list[Request], mode: SwapMode) -> None:
    if mode == "abort":
        # Those of an engine that failed are in the queue.
        for request in (*taken, *runtime.queue.take_begun()):
            request.call.finish(request, aborted("update_weights(mode='abort')", "cancelled"))


def _go_on(
    runtime: Runtime, stand: Standstill, stopped: dict[int, float], taken: list[Request]
) -> None:
    def go(channel: Channel) -> None:
        channel.stops.discard(_STOP)
        channel.draining = False
        if (since := stopped.get(channel.engine_index)) is not None:
            stand.pauses[channel.engine_index] = time.perf_counter() - since

    # Before the engines go on: what they had comes first.
    runtime.resume(taken)
    futures = [(w, w.channel.run(lambda w=w: go(w.channel))) for w in stand.workers]
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
        worker.channel.draining = True
        return bool(worker.channel.stops), bool(worker.channel.books.held)

    found = stand.run(begin)
    stopped = {index for index, (stops, _) in found.items() if stops}
    holding = any(stops and held for stops, held in found.values())
    if holding or runtime.queue.waits_for(stopped, all_there_are=len(stopped) == len(found)):
        raise InvalidRequest(
            f"mode='drain' waits for running outputs, but engine {min(stopped)} is paused or "
            "without its KV cache; continue_generation() or resume_memory_occupation() first, or "
            "use another mode"
        )


def _may_step(channel: Channel) -> bool:
    return not channel.stops and channel.weightless is None


def _has_work(channel: Channel) -> bool:
    return channel.scheduler is not None and channel.scheduler.has_work()


def _nothing() -> None:
    """Only the moment counts."""
