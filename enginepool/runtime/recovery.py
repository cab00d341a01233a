"""What becomes of an engine that failed, and of the requests that it had.

An engine is reset, in milliseconds, or rebuilt, where a reset fails or does not help. It comes
back with the pool's current weights, and never in the middle of a swap.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from enginepool.engine.states import EngineState
from enginepool.engine.worker import EngineWorker
from enginepool.errors import NotFinite, PoolClosed, StepTimeout
from enginepool.requests.request import Request, aborted, not_finite
from enginepool.weights.placement import place

if TYPE_CHECKING:
    from enginepool.runtime.runtime import Runtime

# Failures in a row, without a finished request in between, count for this long.
WINDOW_SECONDS = 60.0
# From this many in a row on, an engine is rebuilt instead of reset.
REBUILD_AFTER = 3
# A request that was present in so many failures, without an output token in between, runs alone;
# if that fails too, it ends.
MAX_FAILURES = 2


class Recovery:
    """What workers of a pool report to; see `worker.Supervisor`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._times: dict[int, list[float]] = {}  # of failures, by engine

    def engine_failed(
        self, worker: EngineWorker, error: BaseException, trace: str, requests: list[Request]
    ) -> None:
        self._lost("engine_quarantined", worker, error, requests, exception=trace)

    def engine_stuck(self, worker: EngineWorker, since: float, reason: str) -> None:
        """A step that began then does not return. On another thread than the engine's."""
        with self._runtime.queue.moving():
            requests = worker.abandon(since, reason)
            if requests is not None:
                self._lost("engine_abandoned", worker, StepTimeout(reason), requests)

    def engine_unloaded(self, worker: EngineWorker, requests: list[Request]) -> None:
        if self._runtime.released is None:  # else it was asked for
            self._runtime.events.add(
                "engine_unloaded",
                worker,
                level="warning",
                reason=worker.reason,
                requests=len(requests),
            )
        self._runtime.resume(requests)

    def engine_closed(self, requests: list[Request]) -> None:
        runtime = self._runtime
        if runtime.closed:
            runtime.fail(requests, PoolClosed(f"pool {runtime.name!r} was closed"))
        else:
            runtime.resume(requests)

    def recover(self, worker: EngineWorker, error: BaseException) -> bool:
        return recover(self._runtime, worker, error, lambda: self._count(worker))

    def _lost(
        self,
        event: str,
        worker: EngineWorker,
        error: BaseException,
        requests: list[Request],
        **about: str,
    ) -> None:
        self._runtime.events.add(
            event, worker, level="warning", reason=worker.reason, requests=len(requests), **about
        )
        self._runtime.resume(sort_out(self._runtime, worker, error, requests))

    def _count(self, worker: EngineWorker) -> int:
        """Count a failure of this engine; returns how many there are in a row."""
        now = time.perf_counter()
        since = max(worker.channel.books.last_output, now - WINDOW_SECONDS)
        times = self._times.get(worker.index, [])
        self._times[worker.index] = [at for at in times if at > since] + [now]
        return len(self._times[worker.index])


def pause_before(attempt: int) -> float:
    """Seconds to wait before the so-manieth recovery in a row: none, then growing."""
    return 0.0 if attempt <= 1 else 0.05 * 4.0 ** (attempt - 2)


def sort_out(
    runtime: Runtime, worker: EngineWorker, error: BaseException, requests: Sequence[Request]
) -> list[Request]:
    """Of the requests of a failed engine, end those that cannot go on; returns the others."""
    if isinstance(error, NotFinite):
        return _sort_out_not_finite(runtime, worker, error, requests)
    movable = []
    for request in requests:
        request.failures[worker.index] = f"engine {worker.index}: {worker.reason}"
        progressed = len(request.output_ids) > request.failed_at
        request.failed = 1 if progressed else request.failed + 1
        request.failed_at = len(request.output_ids)
        message = "; ".join(request.failures.values())
        if request.failed > MAX_FAILURES:
            request.call.finish(request, aborted(message, "poisoned"))
        elif request.engine is not None and not runtime.config.restart:
            request.call.finish(request, aborted(message, "engine_failed"))
        else:
            request.alone = request.failed >= MAX_FAILURES
            movable.append(request)
    return movable


def _sort_out_not_finite(
    runtime: Runtime, worker: EngineWorker, error: NotFinite, requests: Sequence[Request]
) -> list[Request]:
    version = worker.channel.books.weight_version
    movable = []
    for request in requests:
        broken = request in error.requests
        again = broken and request.not_finite == worker.channel.books.swaps
        if broken:
            request.not_finite = worker.channel.books.swaps
            request.failures[worker.index] = f"engine {worker.index}: {worker.reason}"
        if again and not _proven_elsewhere(runtime, worker, besides=request.failures):
            # On two engines, or twice on the only one, and no other has shown that it is them.
            if not _proven_elsewhere(runtime, worker):
                for other in runtime.workers:
                    other.channel.books.hopeless = worker.channel.books.swaps
            request.call.finish(request, not_finite(version))
        else:
            movable.append(request)
    return movable


def _proven_elsewhere(
    runtime: Runtime, worker: EngineWorker, besides: Collection[int] = ()
) -> bool:
    """Whether another engine, none of `besides`, has given finite numbers with the same update of
    weights."""
    update = worker.channel.books.swaps
    others = (w for w in runtime.workers if w is not worker and w.index not in besides)
    return any(other.channel.books.proven == update for other in others)


def recover(
    runtime: Runtime, worker: EngineWorker, error: BaseException, count: Callable[[], int]
) -> bool:
    """Bring an engine back, on its own thread; False if it stays out, and `reason` says why."""
    attempt = count()
    if isinstance(error, NotFinite):
        # A reset did not help, and the same weights work elsewhere: these here are broken.
        rebuild = attempt > 1 and _proven_elsewhere(runtime, worker)
    else:
        rebuild = attempt >= REBUILD_AFTER
    while True:
        if not runtime.config.restart:
            return False
        if attempt > runtime.config.max_restarts:
            limit = f"max_restarts={runtime.config.max_restarts} in {WINDOW_SECONDS:g} s"
            worker.change(EngineState.QUARANTINED, f"{worker.reason}; {limit} are used up")
            return False
        if worker.stopping.wait(pause_before(attempt)):
            return False
        started = time.perf_counter()
        try:
            kind = _make_anew(runtime, worker, rebuild)
            with runtime.steering.turn("recovery"):
                if runtime.closed:
                    return False
                _bring_up_to_date(runtime, worker)
                worker.enter()
        except Exception as cause:
            reason = f"{worker.reason}; then {worker.state.value} failed: {cause!r}"
            worker.change(EngineState.QUARANTINED, reason, returns=True)
            trace = "".join(traceback.format_exception(cause))
            runtime.events.add(
                "engine_not_recovered", worker, level="warning", reason=reason, exception=trace
            )
            attempt, rebuild = count(), True
            continue
        seconds = time.perf_counter() - started
        runtime.events.add("engine_recovered", worker, by=kind, seconds=seconds, attempt=attempt)
        return True


def _make_anew(runtime: Runtime, worker: EngineWorker, rebuild: bool) -> str:
    if not rebuild:
        worker.change(EngineState.RESETTING, worker.reason, returns=True)
        worker.assembly.reset()
        return "reset"
    worker.change(EngineState.REBUILDING, worker.reason, returns=True)
    siblings = bool(_siblings(runtime, worker))
    kept = {} if siblings else _intact(worker)
    from_checkpoint = not siblings and not kept and runtime.updates == 0
    worker.assembly.rebuild(dummy_weights=not from_checkpoint)
    scheduler: Any = worker.channel.scheduler
    if kept:
        scheduler.leaves.replace(kept)
    elif not from_checkpoint:
        worker.channel.books.swaps = -1  # of no update: `_bring_up_to_date` brings weights
    return "rebuild"


def _intact(worker: EngineWorker) -> dict[str, Any]:
    """The engine's own weights, for when no other engine has them."""
    scheduler = worker.assembly.scheduler
    if scheduler is None or scheduler.leaves.lost():
        return {}
    return dict(scheduler.leaves)


def _bring_up_to_date(runtime: Runtime, worker: EngineWorker) -> None:
    """Current weights, and the stops of the pool. While no swap can begin."""
    channel = worker.channel
    channel.draining = False
    channel.stops = runtime.stops()
    channel.weightless = runtime.released
    scheduler: Any = channel.scheduler
    if "kv_cache" in channel.stops and not scheduler.kv_cache.dropped:
        scheduler.kv_cache.drop()
    if runtime.released is not None:
        return
    current = channel.books.settled and channel.books.swaps == runtime.updates
    if current and not scheduler.leaves.lost():
        return
    for sibling in _siblings(runtime, worker):
        _copy_weights(worker, sibling)
        channel.books.weight_version, channel.books.swaps = runtime.weight_version, runtime.updates
        channel.books.settled = True
        return
    channel.weightless = "its weights are gone, and no other engine has them; update_weights"


def _siblings(runtime: Runtime, worker: EngineWorker) -> list[EngineWorker]:
    """Serving engines that have the current weights."""
    return [
        other
        for other in runtime.serving()
        if other is not worker and other.channel.books.swaps == runtime.updates
    ]


def _copy_weights(worker: EngineWorker, sibling: EngineWorker) -> None:
    """Leaf by leaf: never more than one set and a leaf."""
    schedulers: list[Any] = [worker.channel.scheduler, sibling.channel.scheduler]
    mine, theirs = (scheduler.leaves for scheduler in schedulers)
    for path, spec in mine.specs.items():
        mine.drop([path])
        array = place(theirs[path], spec.sharding, spec.dtype)
        array.block_until_ready()
        mine.replace({path: array})
