"""What a pool is while it is open: workers, queue, tokenizer. Knows nothing of `EnginePool`.

The threads refer to this object and not to the pool, so a pool that is dropped can close itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import jax

from enginepool.config import PoolConfig
from enginepool.devices import resolve_devices
from enginepool.engine.channel import Channel
from enginepool.engine.executable_cache import ExecutableCache
from enginepool.engine.jobs import EngineStopped
from enginepool.engine.worker import EngineWorker
from enginepool.errors import (
    EnginePoolError,
    InvalidRequest,
    NoWeights,
    PoolClosed,
    PoolFailed,
    QueueFull,
)
from enginepool.logs import logger
from enginepool.process.forks import Home
from enginepool.process.guest import quiet_logger
from enginepool.process.tuning import tuned
from enginepool.requests.admission import Admission
from enginepool.requests.queue import RequestQueue
from enginepool.requests.request import Call, Request, aborted
from enginepool.runtime.counts import Counts
from enginepool.runtime.events import Events
from enginepool.runtime.recovery import Recovery
from enginepool.runtime.startup import advise, make_intake, patched, start_workers
from enginepool.runtime.steering_lock import SteeringLock
from enginepool.runtime.watchdog import watching
from enginepool.weights.placement import least_free_bytes


class Runtime:
    """An open pool. Methods are thread-safe unless they say otherwise."""

    def __init__(self, config: PoolConfig, name: str) -> None:
        self.config = config
        self.name = name
        self.home = Home(name)
        self.queue = RequestQueue()
        self.admission = Admission(self.queue, config.max_queued, config.when_full)
        self.cache = ExecutableCache()
        self.workers: list[EngineWorker] = []
        self.counts = Counts()
        self.weight_version: int | str = 0
        self.updates = 0
        self.events = Events(name)
        self.released: str | None = None  # why no engine has weights, if that was asked for
        self.kv_released = False
        self.closed = False
        self.guards = ExitStack()
        self.lock = threading.Lock()
        self.steering = SteeringLock()
        self.recovery = Recovery(self)
        self._closing = threading.Lock()  # whoever closes second waits for the first
        self._calls: set[Call] = set()

    # Opening and closing

    def open(self, on_engine: Callable[[EngineWorker], None] | None = None) -> None:
        """Build and warm up every engine; on failure nothing is left.

        Args:
            on_engine: Called when an engine serves, for those who show progress.
        """
        groups = resolve_devices(self.config.devices, self.config.tp_size)
        try:
            self.guards.enter_context(quiet_logger("sgl_jax"))
            self.guards.enter_context(patched())
            self.workers += [self._make_worker(i, group) for i, group in enumerate(groups)]
            start_workers(self.workers, self.config.warmup, on_engine)
            self.intake = make_intake(self.workers)
            if (limit := self.config.step_timeout) is not None:
                watch = watching(self.name, self.workers, limit, self.recovery.engine_stuck)
                self.guards.enter_context(watch)
            if self.config.tune_host:
                self.guards.enter_context(tuned())
        except BaseException:
            self.close(timeout=None)
            raise
        logger().info("enginepool.opened", pool=self.name, engines=len(self.workers))

    def _make_worker(self, index: int, devices: Sequence[jax.Device]) -> EngineWorker:
        first = min(device.id for device in jax.local_devices())
        platform, free = devices[0].platform, least_free_bytes(devices)
        args = self.config.for_engine(platform, [d.id - first for d in devices], free)
        if index == 0 and platform == "tpu":  # the others differ in what something else takes
            advise(self.config, args, free)
        return EngineWorker(
            index,
            devices,
            args,
            self.queue,
            self.cache,
            name=self.name,
            supervisor=self.recovery,
        )

    def close(self, timeout: float | None) -> bool:
        """Stop every engine and give everything back. Idempotent.

        Waiting callers get `PoolClosed`. Returns whether all threads ended within `timeout`
        seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.lock:
            self.closed = True
        if not self._closing.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            return False  # another thread closes, and waits longer
        try:
            return self._close(deadline)
        finally:
            self._closing.release()

    def _close(self, deadline: float | None) -> bool:
        error = PoolClosed(f"pool {self.name!r} was closed")
        self.fail(self._drain(), error)
        for worker in self.workers:
            worker.stop()
        stuck = []
        for worker in self.workers:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not worker.join(0.0 if worker.stuck else left):
                stuck.append(worker.index)
                worker.channel.give_up(str(error))
        # A stuck engine's callers do not wait for it.
        self.fail(self._unfinished(), error)
        self.fail(self._drain(), error)
        if stuck:
            logger().warning("enginepool.thread_not_stopped", pool=self.name, engines=stuck)
        self.guards.close()
        logger().info("enginepool.closed", pool=self.name)
        return not stuck

    # Requests

    def submit(self, call: Call) -> None:
        """Queue a call's requests.

        Raises:
            PoolClosed: The pool is closed.
            NoWeights: The weights were released, or lost on every engine.
            PoolFailed: No engine is left.
            QueueFull: See `EnginePool`.
            InvalidRequest: See `refuse_to_wait`.
        """
        self.refuse_to_wait(call)
        call.on_finish = self._finished
        with self.lock:
            if self.closed:
                raise PoolClosed(f"pool {self.name!r} is already closed")
            if self.released is not None:
                raise NoWeights(f"pool {self.name!r} has no weights: {self.released}")
            for pinned_to in {request.engine for request in call.requests}:
                if not self._served(pinned_to):
                    raise self.failure(pinned_to)
            if call.requests:
                self._calls.add(call)
        try:
            self.admission.enter(call)
        except QueueFull:
            with self.lock:
                self._calls.discard(call)
            raise
        self._fail_stranded()

    def refuse_to_wait(self, call: Call) -> None:
        """Before a caller waits for outputs.

        Raises:
            InvalidRequest: From the iterator that `update_weights` reads, while no engine that
                may run them takes a step.
        """
        if (outer := self.steering.inside()) is None:
            return
        for pinned_to in {request.engine for request in call.requests}:
            able = [w for w in self.serving() if pinned_to in (None, w.index)]
            if all(worker.channel.stops for worker in able):
                raise InvalidRequest(
                    f"generating inside {outer} would wait for ever: no engine takes a step before "
                    "it returns; generate before it, or use staging='double' without free_kv=True "
                    "on a pool that is not paused, where engines serve while an iterator is read"
                )

    def abort(self, requests: Iterable[Request], message: str, err_type: str) -> None:
        """End exactly these requests; they keep what they have.

        Returns at once. A running request ends after its engine's current step.
        """
        reason = aborted(message, err_type)
        by_engine: dict[int, list[Request]] = {}
        for request in requests:
            if request.finish_reason is not None:
                continue
            # First: whoever moves the request from here on looks at this.
            request.abort_reason = reason
            if self.queue.discard(request) or self.admission.discard(request):
                request.call.finish(request, reason)
            elif request.engine_index is not None:
                by_engine.setdefault(request.engine_index, []).append(request)
        for index, group in by_engine.items():
            self.workers[index].channel.abort(group)

    def find(self, rid: str) -> list[Request]:
        """The unfinished requests whose id, as results show it, is exactly `rid`."""
        return [request for request in self._unfinished() if rid == (request.id or request.rid)]

    def unfinished(self) -> list[Request]:
        return self._unfinished()

    def resume(self, requests: Iterable[Request]) -> None:
        """Queue requests again that were taken out of an engine."""
        again = []
        for request in requests:
            if request.abort_reason is not None:
                request.call.finish(request, request.abort_reason)
            else:
                again.append(request)
        self.queue.put(again, resumed=True)
        for request in again:  # aborted between the look and the put
            if request.abort_reason is not None and self.queue.discard(request):
                request.call.finish(request, request.abort_reason)
        self._fail_stranded()

    def stops(self) -> set[str]:
        """Why no engine of this pool takes a step now."""
        reasons = {"paused": self.queue.paused, "kv_cache": self.kv_released}
        return {reason for reason, holds in reasons.items() if holds}

    def serving(self) -> list[EngineWorker]:
        return [worker for worker in self.workers if worker.serving]

    def present(self) -> list[EngineWorker]:
        """Engines whose loops run, those without weights among them."""
        return [worker for worker in self.workers if worker.present]

    def on_engines(self, job: Callable[[Channel], Any], engine: int | None = None) -> list[Any]:
        """Run `job(channel)` on every engine's thread at a step boundary, and wait."""
        workers = [w for w in self.present() if engine is None or w.index == engine]
        futures = [
            worker.channel.run(lambda channel=worker.channel: job(channel)) for worker in workers
        ]
        results = []
        for worker, future in zip(workers, futures, strict=True):
            try:
                results.append(future.result())
            except EngineStopped:
                logger().debug("enginepool.engine_left", engine=worker.index)
        if self.closed:
            raise PoolClosed(f"pool {self.name!r} is already closed")
        return results

    def _finished(self, request: Request) -> None:
        self.counts.add(request)
        if request.call.done:
            with self.lock:
                self._calls.discard(request.call)

    def _unfinished(self) -> list[Request]:
        with self.lock:
            calls = list(self._calls)
        return [r for call in calls for r in call.requests if r.finish_reason is None]

    def _drain(self) -> list[Request]:
        return self.queue.drain() + self.admission.drain()

    def fail(self, requests: Iterable[Request], error: EnginePoolError) -> None:
        reason = aborted(str(error), type(error).__name__)
        for request in requests:
            request.call.failure = error
            request.call.finish(request, reason)

    def _served(self, pinned_to: int | None) -> bool:
        """Whether an engine is left that may run such a request."""
        workers = self.workers if pinned_to is None else [self.workers[pinned_to]]
        return any(worker.expected for worker in workers)

    def _fail_stranded(self) -> None:
        """End what waits for engines that have left, also between a look and a `put`."""
        if self.closed or self.released is not None:
            return  # `close` ends everything, `update_weights` goes on
        if not self._served(None):
            self.fail(self._drain(), self.failure(None))
        for worker in self.workers:
            if not self._served(worker.index):
                outside = self.admission.stranded(worker.index)
                stranded = self.queue.stranded(worker.index)
                self.fail(outside + stranded, self.failure(worker.index))

    def failure(self, pinned_to: int | None = None) -> EnginePoolError:
        """What to raise where no engine can do it."""
        if self.closed:
            return PoolClosed(f"pool {self.name!r} is already closed")
        unloaded = any(worker.present for worker in self.workers)
        return (NoWeights if unloaded else PoolFailed)(self._why_failed(pinned_to))

    def _why_failed(self, pinned_to: int | None) -> str:
        if pinned_to is not None:
            worker = self.workers[pinned_to]
            return (
                f"engine {pinned_to} of pool {self.name!r} is {worker.state.value} "
                f"({worker.reason}); calls of the pool itself go to the other engines"
            )
        reasons = "; ".join(f"engine {w.index}: {w.reason}" for w in self.workers)
        return f"pool {self.name!r} has no engine left ({reasons})"
