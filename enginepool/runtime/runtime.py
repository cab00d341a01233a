"""An open pool: its workers, its dispatch, its tokenizer. Does not import `EnginePool`.

Threads refer to this object and not to the pool. So a pool that is dropped can close itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import jax

from enginepool.config import PoolConfig
from enginepool.console.start_line import start_line
from enginepool.devices import resolve_devices
from enginepool.dispatch.condition import DesiredState
from enginepool.dispatch.dispatch import Dispatch, EngineRecord
from enginepool.dispatch.events import EngineEvents
from enginepool.dispatch.recovery_policy import Policy
from enginepool.dispatch.steering_lock import SteeringLock
from enginepool.engine.executable_cache import ExecutableCache
from enginepool.engine.jobs import EngineStopped
from enginepool.engine.recovery import Recovery
from enginepool.engine.start_stages import StartStages
from enginepool.engine.worker import EngineWorker
from enginepool.errors import EnginePoolError, PoolClosed, WeightUpdateFailed
from enginepool.logs import logger
from enginepool.lora.adapter import Adapters
from enginepool.process.quiet import quiet_logger
from enginepool.process.tuning import tuned
from enginepool.runtime.startup import (
    advise,
    describe_opening,
    make_input_processor,
    patched,
    read_defaults,
    start_workers,
)
from enginepool.runtime.swap_programs import SwapPrograms
from enginepool.runtime.swap_report import QuantizedMatrix
from enginepool.runtime.watchdog import watching
from enginepool.weights.fit import Fits
from enginepool.weights.placement import least_free_bytes

T = TypeVar("T")


class Runtime:
    """An open pool. Methods are thread-safe unless they say otherwise.

    Attributes:
        desired: The state that every engine should have.
        steering: The lock for calls that change engines.
        dispatch: Takes requests.
        adapters: The adapters that are loaded.
        workers: One for each engine, in order.
        fits: Remembers how the sources of updates fit the model, so that equal ones are not checked
            again.
        swap_programs: Compiles the programs of the first update ahead.
        input_processor: Checks and tokenizes callers' input.
        model_config: Upstream's description of the model. It is there even if an engine is not.
        start: The stages of opening, with their seconds.
        quantized: The error of each matrix that was quantized while the checkpoint was read, by
            path.
        guards: The changes of the process that are undone when the pool closes.
    """

    def __init__(self, config: PoolConfig, name: str, cache: ExecutableCache | None = None) -> None:
        """
        Args:
            cache: Holds compiled programs. Pools may share one. None: this pool gets its own.
        """
        self.config = config
        self.name = name
        self.cache = ExecutableCache() if cache is None else cache
        self.desired = DesiredState()
        self.steering = SteeringLock()
        self.dispatch = Dispatch(name, config, self.desired, self.steering)
        self.adapters = Adapters(
            enabled=bool(config.server_args.get("enable_lora")),
            most=config.server_args.get("max_loaded_loras"),
        )
        self.workers: list[EngineWorker] = []
        self.events = EngineEvents(name)
        self.fits = Fits()
        self.swap_programs = SwapPrograms(name, self.fits, self.cache)
        self.recovery = Recovery(
            self.dispatch,
            Policy(config.restart, config.max_restarts, config.step_timeout),
            self.desired,
            self.steering,
            self.events,
            self.workers,
        )
        self.start = StartStages()
        self.quantized: dict[str, QuantizedMatrix] = {}
        self.guards = ExitStack()
        self._discard_staged: Callable[[str], None] | None = None
        self._closing = threading.Lock()  # a second `close` waits for the first

    # Opening and closing

    def open(self, on_engine: Callable[[EngineWorker], None] | None = None) -> None:
        """Build and warm up every engine. After a failure, the caller closes the pool.

        Args:
            on_engine: Called each time an engine begins to serve, to show progress.
        """
        started = time.perf_counter()
        groups = resolve_devices(self.config.devices, self.config.tp_size)

        def line() -> str:
            return describe_opening(
                self.name, self.start, self.workers, time.perf_counter() - started
            )

        with start_line(line, self.config.progress):
            self._open(groups, on_engine)
        logger().info(
            "enginepool.opened",
            pool=self.name,
            engines=len(self.workers),
            seconds=dict(self.start.seconds),
        )

    def _open(
        self,
        groups: Sequence[Sequence[jax.Device]],
        on_engine: Callable[[EngineWorker], None] | None,
    ) -> None:
        self.guards.enter_context(quiet_logger("sgl_jax"))
        with self.start.stage("patches"):
            self.guards.enter_context(patched())
        with self.start.stage("checkpoint"):
            self.config.check_model()  # raises an error that names the model and no engine
            self.add_engines([self._make_worker(i, group) for i, group in enumerate(groups)])
            defaults = read_defaults(self.config)
        with self.start.stage("engines"):
            start_workers(self.workers, self.config.warmup, on_engine)
            leaves = self.workers[0].assembly.leaves
            if leaves is not None and leaves.quantization is not None:
                errors = leaves.quantization.errors.items()
                self.quantized = {path: QuantizedMatrix(*its) for path, its in errors}
        with self.start.stage("front_end"):
            self.input_processor = make_input_processor(
                self.workers, defaults, self.adapters, self.name
            )
            self.model_config: Any = self.workers[0].scheduler.model_config
        self.guards.callback(self.input_processor.grammars.close)
        if (limit := self.config.step_timeout) is not None:
            watch = watching(self.name, self.workers, limit, self.recovery)
            self.guards.enter_context(watch)
        if self.config.tune_host:
            self.guards.enter_context(tuned())
        if self.config.warmup != "none":  # last, so that opening does not take longer
            self.swap_programs.start(self.workers)

    def add_engines(self, workers: Sequence[EngineWorker]) -> None:
        """Add engines to the pool."""
        self.workers += workers
        self.dispatch.engines += [
            EngineRecord(w.index, w.condition, w.channel.abort) for w in workers
        ]

    def _make_worker(self, index: int, devices: Sequence[jax.Device]) -> EngineWorker:
        first = min(device.id for device in jax.local_devices())
        platform, free = devices[0].platform, least_free_bytes(devices)
        args = self.config.for_engine(platform, [d.id - first for d in devices], free)
        # Advice for one engine is enough. The others differ only in memory that other programs use.
        if index == 0 and platform == "tpu":
            advise(self.config, args, free)
        return EngineWorker(
            index,
            devices,
            args,
            self.dispatch.queue,
            self.cache,
            name=self.name,
            recovery=self.recovery,
            max_decode_steps=self.config.max_decode_steps,
            adapters=self.adapters,
        )

    def close(self, timeout: float | None) -> bool:
        """Stop every engine and give everything back. Idempotent.

        Waiting callers get `PoolClosed`.

        Returns:
            Whether all threads ended within `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.dispatch.lock:
            self.dispatch.closed = True
        self.steering.close(str(self.failure()))
        if not self._closing.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            return False  # another thread is still closing the pool
        try:
            return self._close(deadline)
        finally:
            self._closing.release()

    def _close(self, deadline: float | None) -> bool:
        error = self.failure()
        self.discard_staged(str(error))
        self.swap_programs.stop(0.0)
        dispatch = self.dispatch
        dispatch.fail(dispatch.take_waiting(), error)
        for worker in self.workers:
            worker.stop()

        def left() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        stuck = []
        for worker in self.workers:
            if not worker.join(0.0 if worker.condition.abandoned else left()):
                stuck.append(worker.index)
                worker.channel.stop_stuck(str(error))
        # Callers do not wait for a stuck engine.
        dispatch.fail(dispatch.unfinished(), error)
        dispatch.fail(dispatch.take_waiting(), error)
        if stuck:
            logger().warning("enginepool.thread_not_stopped", pool=self.name, engines=stuck)
        ended = self.swap_programs.stop(left())
        self.guards.close()
        logger().info("enginepool.closed", pool=self.name)
        return ended and not stuck

    @property
    def closed(self) -> bool:
        return self.dispatch.closed

    # Staged weights: one set at a time, changed under `steering`

    def hold_staged(self, discard: Callable[[str], None]) -> None:
        """Remember a staged set, which the next set replaces.

        Args:
            discard: Frees the set. Its argument says why the set cannot be committed any more.
        """
        self._discard_staged = discard
        if self.closed:
            self.discard_staged(str(self.failure()))

    def discard_staged(self, why: str) -> None:
        discard, self._discard_staged = self._discard_staged, None
        if discard is not None:
            discard(why)

    # The engines

    def reachable(self) -> list[EngineWorker]:
        """Engines whose loops run, including those without weights."""
        return [worker for worker in self.workers if worker.condition.reachable]

    def failure(self, failed: Sequence[EngineWorker] = ()) -> EnginePoolError:
        """The error to raise if the pool was closed, or if these engines have failed.

        Args:
            failed: Engines that have failed. Others may serve. Empty: no engine's loop runs.
        """
        if self.closed:
            return PoolClosed(f"pool {self.name!r} was closed")
        failed = failed or [worker for worker in self.workers if worker.condition.recovering]
        coming_back = any(worker.condition.recovering for worker in failed)
        if not failed or not (coming_back or self.reachable()):
            return self.dispatch.failure()
        listed = "; ".join(f"engine {each.index}: {each.condition.reason}" for each in failed)
        return WeightUpdateFailed(
            f"engines have failed ({listed}); those that come back get the weights that the pool "
            "has; try again",
            engine_index=failed[0].index,
        )

    def on_engines(
        self, job: Callable[[EngineWorker], T], engine_index: int | None = None
    ) -> list[T]:
        """Run `job(worker)` at a step boundary of every engine, or of one, and wait."""
        workers = [w for w in self.reachable() if engine_index in (None, w.index)]
        futures = [worker.channel.run(lambda worker=worker: job(worker)) for worker in workers]
        results = []
        for worker, future in zip(workers, futures, strict=True):
            try:
                results.append(future.result())
            except EngineStopped:
                logger().debug("enginepool.engine_left", engine=worker.index)
        self.dispatch.check_open()
        return results
