"""One engine's thread: builds the engine, warms it up, runs its loop, takes it apart."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

import jax

from enginepool.channel import Channel
from enginepool.compilation import ExecutableCache
from enginepool.jobs import StopEngine
from enginepool.logs import logger
from enginepool.queue import RequestQueue
from enginepool.requests import Request

if TYPE_CHECKING:
    from sgl_jax.srt.entrypoints.engine import Engine


_current = threading.local()


def on_engine_thread() -> bool:
    """Whether the calling thread is an engine's, of whichever pool."""
    return getattr(_current, "is_engine", False)


class EngineState(Enum):
    """What an engine is doing, in words that a person can read."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"  # it finishes what it has, for a swap of weights
    PAUSED = "paused"
    UNLOADED = "unloaded"  # without weights; the next update_weights loads it
    QUARANTINED = "quarantined"  # a step failed; it gets no requests
    CLOSED = "closed"


class EngineWorker:
    """A thread pinned to one engine's devices. The thread starts with `start()`.

    Attributes:
        engine: Upstream's Engine, from the moment it is built; an empty shell once it has left.
        ready: Resolves when the engine is built, then warm; fails with what stopped it.
        reason: Why the engine is in its state, for states that need one.
    """

    def __init__(
        self,
        index: int,
        devices: Sequence[jax.Device],
        server_args: dict[str, Any],
        queue: RequestQueue,
        cache: ExecutableCache,
        *,
        name: str,
        on_failure: Callable[[EngineWorker, BaseException, list[Request]], None],
        on_unloaded: Callable[[EngineWorker, list[Request]], None],
    ) -> None:
        self.index = index
        self.devices = tuple(devices)
        self.channel = Channel(index, queue)
        self.engine: Engine | None = None
        self._state = EngineState.STARTING
        self.reason: str | None = None
        self.build_seconds = self.warmup_seconds = 0.0
        self.built: Future[None] = Future()
        self.warm: Future[None] = Future()
        self._server_args = server_args
        self._queue = queue
        self._cache = cache
        self._on_failure = on_failure
        self._on_unloaded = on_unloaded
        self._may_warm_up = threading.Event()
        self._warmup = True
        self._stopping = False
        self._thread = threading.Thread(
            target=self._main, name=f"{name}-engine-{index}", daemon=True
        )

    def __repr__(self) -> str:
        devices = ",".join(str(device.id) for device in self.devices)
        held = self.channel.load()
        return f"<EngineWorker {self.index} device {devices} [{self.state.value}, {held} running]>"

    def start(self) -> None:
        self._thread.start()

    def warm_up(self, *, compile_programs: bool) -> None:
        """Let a built engine go on to warm-up and then to serving; `warm` tells when."""
        self._warmup = compile_programs
        self._may_warm_up.set()

    def stop(self) -> None:
        """End the thread at the engine's next step boundary, or before it serves at all."""
        self._stopping = True
        self._may_warm_up.set()
        self.channel.stop()

    @property
    def state(self) -> EngineState:
        """What the engine does; a paused one serves, but takes no step."""
        if self._state is not EngineState.SERVING:
            return self._state
        if self.channel.weightless is not None:
            return EngineState.UNLOADED
        if self.channel.stops:
            return EngineState.PAUSED
        return EngineState.DRAINING if self.channel.draining else EngineState.SERVING

    @property
    def present(self) -> bool:
        """Whether the engine's loop runs, so that jobs are done."""
        return self._state is EngineState.SERVING

    @property
    def serving(self) -> bool:
        """Whether the engine may be given requests."""
        return self.present and self.channel.weightless is None

    def join(self, timeout: float | None) -> bool:
        """Wait for the thread to end; False if it is still there after `timeout` seconds."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # On the thread

    def _main(self) -> None:
        _current.is_engine = True
        # A daemon, so that a script which forgets to close exits; `close()` joins it.
        with self._cache.sharing(), jax.default_device(self.devices[0]):
            try:
                self._build()
                self._serve()
            finally:
                self._take_apart()

    def _build(self) -> None:
        # Not at the top: importing sgl_jax has side effects that the patches must precede.
        from enginepool.engine import build_engine

        started = time.perf_counter()
        try:
            self.engine = build_engine(self._server_args, self.devices, self.channel)
        except BaseException as error:
            self._state, self.reason = EngineState.CLOSED, repr(error)
            self.built.set_exception(error)
            return
        self.build_seconds = time.perf_counter() - started
        self.built.set_result(None)

    def _serve(self) -> None:
        scheduler = self.channel.scheduler
        if scheduler is None:
            return
        self._may_warm_up.wait()
        try:
            if self._stopping:
                raise StopEngine
            if self._warmup:
                self._compile(scheduler)
            self._state = EngineState.SERVING
            self._queue.attach(self.index, self.channel.load, self.channel.wake)
            self.warm.set_result(None)
            self._run(scheduler)
        except StopEngine:
            self._leave(None)
        except BaseException as error:
            self._leave(error)

    def _run(self, scheduler: Any) -> NoReturn:
        while True:
            try:
                scheduler.event_loop_normal()
            except Exception as error:
                lost = scheduler.leaves.lost()
                if not lost:
                    raise
                logger().warning(
                    "enginepool.weights_lost", engine=self.index, leaves=len(lost), error=str(error)
                )
                self.unload(
                    f"{len(lost)} weights ({lost[0]} …) were deleted or donated by who shared "
                    "them with update_weights; pass copy=True to keep a copy of them"
                )

    # On the thread, as jobs

    def unload(self, reason: str) -> None:
        """The engine has no weights: it takes no step until `load`, its requests move on."""
        self.channel.weightless = self.reason = reason
        requests = self.channel.take_back() + self._queue.detach(self.index)
        self._on_unloaded(self, requests)

    def load(self) -> None:
        """The engine has weights again."""
        if self.channel.weightless is not None:
            self.channel.weightless = self.reason = None
            self._queue.attach(self.index, self.channel.load, self.channel.wake)

    def _compile(self, scheduler: Any) -> None:
        from enginepool.warmup import warm_up

        started = time.perf_counter()
        warm_up(scheduler)
        self.warmup_seconds = time.perf_counter() - started

    def _leave(self, error: BaseException | None) -> None:
        """The loop has ended: no request may stay here."""
        if error is None:
            self._state = EngineState.CLOSED
            why = f"engine {self.index} is closed"
        else:
            self._state = EngineState.QUARANTINED
            self.reason = f"{type(error).__name__}: {error}"
            why = f"engine {self.index} is quarantined: {self.reason}"
        pinned = self._queue.detach(self.index)
        requests = self.channel.close(why) + pinned
        if not self.warm.done():
            self.warm.set_exception(error or RuntimeError(why))
        elif error is not None:
            logger().warning(
                "enginepool.engine_quarantined",
                engine=self.index,
                devices=[device.id for device in self.devices],
                reason=self.reason,
                requests=len(requests),
            )
        self._on_failure(self, error or StopEngine(), requests)

    def _take_apart(self) -> None:
        if self.engine is not None:
            from enginepool.engine import dismantle

            dismantle(self.engine)
