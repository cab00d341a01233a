"""EnginePool: one sglang-jax Engine on each device, in this process, used as one."""

from __future__ import annotations

import atexit
import itertools
import sys
import threading
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Self

import anyio.to_thread

from enginepool.config import PoolConfig, Warmup, WhenFull
from enginepool.devices import DeviceSpec
from enginepool.errors import InvalidRequest, PoolClosed
from enginepool.pool.adapters import AdapterCalls
from enginepool.pool.chat import ChatCalls
from enginepool.pool.generate import GenerateCalls
from enginepool.pool.never_closed import CLOSE_SECONDS, close_dropped, closing_at_exit
from enginepool.pool.score import ScoreCalls
from enginepool.pool.steering import SteeringCalls
from enginepool.pool.training import WeightCalls
from enginepool.process.forks import PoolProcess
from enginepool.runtime import statistics
from enginepool.runtime.runtime import Runtime
from enginepool.values import is_int, plain, seconds, shown

if TYPE_CHECKING:
    from enginepool.pool.tokenizer_manager import FrontEnd

_numbers = itertools.count()


class PoolState(Enum):
    UNOPENED = "not open yet"  # the constructor starts nothing; the first call opens
    OPEN = "open"
    CLOSED = "closed"  # for good


class EnginePool(GenerateCalls, ChatCalls, ScoreCalls, SteeringCalls, WeightCalls, AdapterCalls):
    """One sglang-jax engine on each device of a host, used as one object.

    The constructor checks its arguments and starts nothing. `with`, `async with`, `open()` or the
    first call opens the pool. `close()` is final. Any thread may call any method, also a thread
    with a running event loop. The async methods run on any asyncio or trio loop.

    Args:
        model: A directory or hub id in Hugging Face layout. None: the toy model that ships with
            enginepool.
        devices: A count of engines, a list of device ids or `jax.Device`s, or None for every
            local device. On the CPU platform, a count of N makes N × `tp_size` virtual devices if
            JAX has not started yet.
        tp_size: The number of devices of one engine.
        warmup: "sequential" compiles every program before the pool serves, one engine after the
            other. "parallel" does so on all engines at once. "none" compiles while serving.
        restart: Bring an engine back after a failed step. Otherwise it stays out.
        max_restarts: How many failures in a row an engine may have before it stays out. Failures
            are in a row if they are within 60 seconds and no request has finished in between.
        step_timeout: Seconds after which a step counts as stuck; None for no limit. The engine's
            requests then move to other engines. The engine is brought back once the step returns.
            A compilation while serving (warmup="none") counts as part of its step, and so do all
            decode steps that run in one program (`max_decode_steps`).
        max_decode_steps: How many decode steps a device may run in one program, from 1 to 8. If
            no request streams or waits to join, a program runs about 40 ms of steps. Otherwise it
            runs several only if the device would wait for the host. It never runs more than a
            sixteenth of the mean length of recent outputs. An abort, and the next tokens of a
            stream, wait for the program's end.
        max_queued: How many requests may wait for an engine; None for no limit. A call with more
            requests than `max_queued` waits until the queue is empty.
        when_full: What a call does when the queue is full. "block": it waits, and the wait counts
            for its timeout. "raise": it raises QueueFull at once.
        tune_host: Tune this process for many engines until the pool closes. Threads hand over the
            GIL after 0.5 ms instead of 5 ms. The garbage collector skips the objects that exist
            when the pool has opened (`gc.freeze`).
        progress: While the pool opens, show one line on standard error that says what it does. The
            line is removed at the end. Nothing is shown if standard error is not a terminal.
        server_args: All other options of upstream's `ServerArgs`, under their own names.

    Raises:
        InvalidConfig: A name is unknown, or an option is not possible in a pool. The error says
            why.
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
        progress: bool = True,
        **server_args: Any,
    ) -> None:
        self._state = PoolState.UNOPENED
        self._lock = threading.RLock()
        self._open_runtime: Runtime | None = None
        self._closing_runtime: Runtime | None = None  # until it is closed completely
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
            progress=progress,
            server_args=server_args,
        )

    def __repr__(self) -> str:
        runtime = self._open_runtime
        if runtime is None:
            return f"<EnginePool {self.name!r} [{self._state.value}]>"
        if not runtime.dispatch.process.here:
            return f"<EnginePool {self.name!r} [open in process {runtime.dispatch.process.pid}]>"
        running = sum(worker.channel.running.unfinished for worker in runtime.workers)
        serving = len(runtime.dispatch.serving())
        return (
            f"<EnginePool {self.name!r} [{serving} of {len(runtime.workers)} "
            f"engines serving | {running} running, {runtime.dispatch.waiting} waiting]>"
        )

    # Opening and closing

    def open(self, *, on_engine: Callable[[dict[str, Any]], None] | None = None) -> Self:
        """Build and warm up all engines. On an open pool it does nothing.

        Args:
            on_engine: Called once for each engine when it serves, with its part of `stats()`.

        Raises:
            PoolClosed: The pool was closed.
            EngineStartFailed: An engine did not start. The error has its devices and the cause.
                All engines are closed again, and `open()` may be called again.
            InvalidConfig: The options do not fit the model or the devices.
            InvalidWeights: The checkpoint's files do not fit its configuration. `open()` may be
                called again.
        """
        self._open_once(on_engine)
        return self

    def _open_once(self, on_engine: Callable[[dict[str, Any]], None] | None = None) -> Runtime:
        self._check_process()
        with self._lock:
            if self._state is PoolState.CLOSED:
                raise PoolClosed(f"pool {self.name!r} is already closed; make a new one")
            if self._open_runtime is None:
                self._open_runtime = self._opened(on_engine)
                self._state = PoolState.OPEN
            return self._open_runtime

    @staticmethod
    def make_runtime(config: PoolConfig, name: str) -> Runtime:
        """Make the parts of an open pool. Tests and tools replace it, to use parts of their own."""
        return Runtime(config, name)

    def _opened(self, on_engine: Callable[[dict[str, Any]], None] | None) -> Runtime:
        runtime = self.make_runtime(self.config, self.name)
        self._process = runtime.dispatch.process
        try:
            runtime.open(on_engine and (lambda worker: on_engine(statistics.engine(worker))))
            # This module imports sgl_jax. `runtime.open` has applied the patches.
            from enginepool.pool.tokenizer_manager import connect

            connect(runtime)
        except BaseException:
            self._process = None
            runtime.close(None)
            raise
        # For a script that does not close the pool. The hook ends the engines' threads before
        # Python ends.
        self._at_exit = closing_at_exit(runtime)
        atexit.register(self._at_exit)
        return runtime

    def close(self, timeout: float | None = CLOSE_SECONDS) -> None:
        """Stop all engines and restore the process as it was before `open()`. Final.

        Callers that wait get `PoolClosed`. A second `close()` does nothing. If an engine's step
        does not return within `timeout` seconds, its thread is left behind and the log has a
        warning. `close` does nothing in a forked child of the process that opened the pool.
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
        """`close` without blocking the event loop. Cancellation does not stop it."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.close, timeout)

    @property
    def closed(self) -> bool:
        return self._state is PoolState.CLOSED

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        await self._async_runtime()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self, python_is_gone: Callable[[], bool] = sys.is_finalizing) -> None:
        # While Python ends, `closing_at_exit` has closed the pool, and modules may be gone.
        runtime = getattr(self, "_open_runtime", None)
        if runtime is None or python_is_gone() or runtime.closed:
            return
        if runtime.dispatch.process.here:
            close_dropped(self, self.close)

    def _check_process(self) -> None:
        if self._process is not None:
            self._process.check()

    @property
    def runtime(self) -> Runtime:
        self._check_process()
        return self._open_runtime or self._open_once()  # another thread may close it meanwhile

    async def _async_runtime(self) -> Runtime:
        if self._open_runtime is None:
            await anyio.to_thread.run_sync(self.open)
        return self.runtime

    @property
    def engines(self) -> list[Any]:
        """Upstream's Engine objects, one for each engine of the pool. Opens the pool."""
        return [worker.engine for worker in self.runtime.workers]

    def front_end(self, engine_index: int | None = None) -> FrontEnd:
        """A replacement of upstream's TokenizerManager, for upstream's serving classes.

        Opens the pool.

        Args:
            engine_index: The engine that runs its requests. None: all engines do.

        Raises:
            InvalidRequest: There is no such engine.
        """
        runtime, engine_index = self.runtime, plain(engine_index)
        last = len(runtime.workers) - 1
        if not (engine_index is None or (is_int(engine_index) and 0 <= engine_index <= last)):
            raise InvalidRequest(
                f"engine_index={shown(engine_index)}: expected an integer from 0 to {last}, or "
                "None for all engines"
            )
        from enginepool.pool.tokenizer_manager import FrontEnd

        return FrontEnd(runtime, engine_index)
