"""EnginePool: one sglang-jax Engine on each device, in this process, used as one."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import sys
import threading
import warnings
from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio.to_thread

from enginepool.config import PoolConfig, Warmup, WhenFull
from enginepool.devices import DeviceSpec
from enginepool.engine.worker import on_engine_thread
from enginepool.errors import PoolClosed
from enginepool.pool.chat import ChatCalls
from enginepool.pool.generate import GenerateCalls
from enginepool.pool.score import ScoreCalls
from enginepool.pool.steering import SteeringCalls
from enginepool.pool.training import WeightCalls
from enginepool.process.forks import PoolProcess, python_ends
from enginepool.runtime import statistics
from enginepool.runtime.runtime import Runtime
from enginepool.values import seconds

if TYPE_CHECKING:
    from enginepool.pool.tokenizer_manager import FrontEnd

_numbers = itertools.count()
# How long `close()` waits for the engines' threads; one that is in a step cannot be ended.
CLOSE_SECONDS = 60.0


class PoolState(Enum):
    UNOPENED = "not open yet"  # the constructor starts nothing; the first call opens
    OPEN = "open"
    CLOSED = "closed"  # for good


def _closing_at_exit(runtime: Runtime) -> Callable[[], None]:
    """What runs at exit unless the pool is closed before; does not keep the pool alive."""

    def close() -> None:
        if runtime.dispatch.process.here:  # not in a forked child that ends as a script does
            python_ends()
            runtime.close(CLOSE_SECONDS)
            warnings.warn(f"pool {runtime.name!r} was never closed", ResourceWarning, stacklevel=2)

    return close


class EnginePool(GenerateCalls, ChatCalls, ScoreCalls, SteeringCalls, WeightCalls):
    """Engines on all devices of a host behind one object.

    The constructor checks its arguments and starts nothing. `with`, `async with`, `open()` or
    the first call opens the pool; `close()` is final. All methods may be called from any thread,
    also while an event loop runs there; the async ones on any asyncio or trio loop.

    Args:
        model: A directory or hub id in Hugging Face layout; left out, the toy that ships with
            enginepool.
        devices: A count of engines, a list of device ids or `jax.Device`s, or None for every
            local device. On the CPU platform with JAX not started yet, N engines mean N virtual
            devices.
        tp_size: Devices of one engine.
        warmup: "sequential" compiles every program before serving, one engine after the other;
            "parallel" all engines at once; "none" compiles while serving.
        restart: Bring an engine back whose step failed; without it, it stays out.
        max_restarts: How often in a row, without a finished request in between and within 60
            seconds, an engine is brought back before it stays out.
        step_timeout: Seconds after which a step counts as stuck: its requests move on, and its
            engine is brought back when the step returns after all. Programs that compile while
            serving (warmup="none") count as part of a step, and so do all the steps of a dispatch
            (`max_decode_steps`). None for no limit.
        max_decode_steps: How many decode steps may be one dispatch, 8 at most. There are as many as
            take about 40 ms while nobody streams or waits to join; others only where a device would
            wait for the host; and at most a sixteenth of what outputs have had on average. What
            waits for a step, as an abort or the next tokens of a stream, then waits for so many.
            1 for one by one.
        max_queued: How many requests may wait for an engine; None for no limit. A call that is
            larger enters when nothing waits.
        when_full: "block" lets further calls wait their turn (their timeout runs); "raise" makes
            them raise QueueFull at once.
        tune_host: Make this process cheaper for many engines until the pool closes: threads
            hand over the GIL after 0.5 ms instead of 5, and garbage collections pass over what
            exists when the pool has opened (`gc.freeze`).
        server_args: Everything else of upstream's `ServerArgs`, under its own names.

    Raises:
        InvalidConfig: An unknown name, or an option that cannot hold in a pool, with the reason.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        devices: DeviceSpec = None,
        tp_size: int = 1,
        warmup: Warmup = "sequential",
        restart: bool = True,
        max_restarts: int = 5,
        step_timeout: float | None = PoolConfig.step_timeout,
        max_decode_steps: int = PoolConfig.max_decode_steps,
        max_queued: int | None = None,
        when_full: WhenFull = "block",
        tune_host: bool = False,
        **server_args: Any,
    ) -> None:
        self._state = PoolState.UNOPENED
        self._lock = threading.RLock()
        self._open_runtime: Runtime | None = None
        self._closing_runtime: Runtime | None = None  # until all of it is given back
        self._process: PoolProcess | None = None  # once it opens
        self._at_exit: Callable[[], None] | None = None
        self.name = f"enginepool-{next(_numbers)}"
        if model is None:
            from enginepool import toy

            model = str(toy.checkpoint())
            server_args.setdefault("served_model_name", "toy")
        self.config = PoolConfig(
            str(model),
            devices,
            tp_size,
            warmup,
            restart=restart,
            max_restarts=max_restarts,
            step_timeout=step_timeout,
            max_decode_steps=max_decode_steps,
            max_queued=max_queued,
            when_full=when_full,
            tune_host=tune_host,
            server_args=server_args,
        )

    def __repr__(self) -> str:
        runtime = self._open_runtime
        if runtime is None:
            return f"<EnginePool {self.name!r} [{self._state.value}]>"
        if not runtime.dispatch.process.here:
            return f"<EnginePool {self.name!r} [open in process {runtime.dispatch.process.pid}]>"
        running = sum(worker.channel.load() for worker in runtime.workers)
        serving = len(runtime.dispatch.serving())
        return (
            f"<EnginePool {self.name!r} [{serving} of {len(runtime.workers)} "
            f"engines serving | {running} running, {len(runtime.dispatch.queue)} waiting]>"
        )

    # Life

    def open(self, *, on_engine: Callable[[dict[str, Any]], None] | None = None) -> Self:
        """Build and warm up all engines. Idempotent while open.

        Args:
            on_engine: Called with an engine's part of `stats()` when that engine serves.

        Raises:
            PoolClosed: The pool was closed.
            EngineStartFailed: With the device and the cause; the others are closed again, and
                `open()` may be tried again.
            InvalidWeights: The checkpoint's files do not fit its configuration; likewise.
        """
        self._check_process()
        with self._lock:
            if self._state is PoolState.CLOSED:
                raise PoolClosed(f"pool {self.name!r} is already closed; make a new one")
            if self._open_runtime is None:
                self._open_runtime = self._opened(on_engine)
                self._state = PoolState.OPEN
        return self

    def _opened(self, on_engine: Callable[[dict[str, Any]], None] | None) -> Runtime:
        runtime = Runtime(self.config, self.name)
        self._process = runtime.dispatch.process
        report = None
        if on_engine is not None:
            report = lambda worker: on_engine(statistics.engine(worker))  # noqa: E731
        try:
            runtime.open(report)
            from enginepool.pool.tokenizer_manager import (
                connect,  # imports sgl_jax; patches come first
            )

            connect(runtime)
        except BaseException:
            self._process = None
            runtime.close(None)
            raise
        # A script that forgets to close: the engines' threads end before Python does.
        self._at_exit = _closing_at_exit(runtime)
        atexit.register(self._at_exit)
        return runtime

    def close(self, timeout: float | None = CLOSE_SECONDS) -> None:
        """Stop all engines and give everything back to the process. Idempotent and final.

        Callers that wait get `PoolClosed`. A thread inside a step that does not return within
        `timeout` seconds is left behind, with a warning in the log. In a forked child of the
        process that opened the pool it does nothing.
        """
        timeout = seconds("timeout", timeout, zero=True)
        if self._process is not None and not self._process.here:
            return
        with self._lock:
            self._state = PoolState.CLOSED
            if self._open_runtime is not None:
                self._closing_runtime, self._open_runtime = self._open_runtime, None
        runtime = self._closing_runtime
        if runtime is not None:
            if self._at_exit is not None:
                atexit.unregister(self._at_exit)
            runtime.close(timeout)
            self._closing_runtime = None

    async def aclose(self, timeout: float | None = CLOSE_SECONDS) -> None:
        """`close` without blocking the event loop; shielded from cancellation."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.close, timeout)

    @property
    def closed(self) -> bool:
        return self._state is PoolState.CLOSED

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        await self._async_runtime()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self, python_is_gone: Callable[[], bool] = sys.is_finalizing) -> None:
        # When Python takes its modules down, `_closing_at_exit` has done it, and what this needs
        # may be gone.
        runtime = getattr(self, "_open_runtime", None)
        if (
            runtime is None
            or python_is_gone()
            or runtime.closed
            or not runtime.dispatch.process.here
        ):
            return
        try:
            warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, 2, source=self)
        finally:  # a warning may be an error
            if on_engine_thread():
                # The garbage collector ran there: that thread cannot wait for itself, and must
                # not keep its own pool waiting for this one.
                with contextlib.suppress(RuntimeError):  # no new threads while Python ends
                    threading.Thread(target=self.close, daemon=True).start()
            else:
                self.close()

    def _check_process(self) -> None:
        if self._process is not None:
            self._process.check()

    def _runtime(self) -> Runtime:
        self._check_process()
        runtime = self._open_runtime
        if runtime is None:
            runtime = self.open()._open_runtime
        assert runtime is not None
        return runtime

    async def _async_runtime(self) -> Runtime:
        if self._open_runtime is None:
            await anyio.to_thread.run_sync(self.open)
        return self._runtime()

    @property
    def engines(self) -> list[Any]:
        """Upstream's Engine objects, one a replica; opens the pool."""
        return [worker.engine for worker in self._runtime().workers]

    def front_end(self, engine_index: int | None = None) -> FrontEnd:
        """What upstream's serving classes take for a TokenizerManager: requests through it run on
        all engines, or on one. Opens the pool."""
        runtime = self._runtime()
        from enginepool.pool.tokenizer_manager import FrontEnd

        return FrontEnd(runtime, engine_index)
