"""One engine's thread: builds the engine, warms it up, runs its loop, takes it apart.

When a step fails the thread hands over what the engine held, asks its supervisor what to do,
does it, and runs the loop again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import jax

from enginepool.dispatch.condition import EngineCondition
from enginepool.dispatch.queue import RequestQueue
from enginepool.dispatch.states import EngineState
from enginepool.engine.build import Assembly
from enginepool.engine.channel import Channel
from enginepool.engine.executable_cache import ExecutableCache
from enginepool.engine.gil_limiter import process_limiter
from enginepool.engine.jobs import EngineBroken, StopEngine
from enginepool.engine.recovery_protocol import Decision, Supervisor
from enginepool.errors import StepTimeout
from enginepool.logs import take_traceback

if TYPE_CHECKING:
    from sgl_jax.srt.entrypoints.engine import Engine

    from enginepool.engine.scheduler import PinnedScheduler
    from enginepool.weights.leaves import EngineLeaves


_current = threading.local()


def on_engine_thread() -> bool:
    """Whether the calling thread is an engine's, of whichever pool."""
    return getattr(_current, "is_engine", False)


class EngineWorker:
    """A thread pinned to one engine's devices. The thread starts with `start()`.

    Attributes:
        condition: What the engine is doing and what it may do.
        channel: The door to it.
        assembly: The engine as an object, and how it is made.
        built, warm: Resolve when the engine is built, then warm; fail with what stopped it.
        stopping: Set when the thread is to end.
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
        supervisor: Supervisor[EngineWorker],
        max_decode_steps: int,
    ) -> None:
        self.index = index
        self.devices = tuple(devices)
        self.condition = EngineCondition()
        self.channel = Channel(
            index, queue, process_limiter(), self.condition, max_decode_steps=max_decode_steps
        )
        self.assembly = Assembly(server_args, self.devices, self.channel)
        self.built: Future[None] = Future()
        self.warm: Future[None] = Future()
        self.stopping = threading.Event()
        self._queue = queue
        self._cache = cache
        self._supervisor = supervisor
        self._may_warm_up = threading.Event()
        self._warmup = True
        self._source: EngineLeaves | None = None
        self._thread = threading.Thread(
            target=self._main, name=f"{name}-engine-{index}", daemon=True
        )

    def __repr__(self) -> str:
        devices = ",".join(str(device.id) for device in self.devices)
        held = self.channel.load()
        state = self.condition.state.value
        return f"<EngineWorker {self.index} device {devices} [{state}, {held} running]>"

    @property
    def engine(self) -> Engine | None:
        """Upstream's Engine; see `Assembly`."""
        return self.assembly.engine

    @property
    def scheduler(self) -> PinnedScheduler:
        """Upstream's Scheduler, of an engine that was built."""
        scheduler = self.assembly.scheduler
        assert scheduler is not None, "there is no engine"
        return scheduler

    @property
    def leaves(self) -> EngineLeaves:
        """The engine's weights; their specs can be read as long as the pool is open."""
        leaves = self.assembly.leaves
        assert leaves is not None, "the engine was never built"
        return leaves

    def start(self, source: EngineLeaves | None = None) -> None:
        """Start the thread, which builds the engine; its weights are copied from `source`."""
        self._source = source
        self._thread.start()

    def warm_up(self, *, compile_programs: bool) -> None:
        """Let a built engine go on to warm-up and then to serving; `warm` tells when."""
        self._warmup = compile_programs
        self._may_warm_up.set()

    def stop(self) -> None:
        """End the thread at the engine's next step boundary, or before it serves at all."""
        self.stopping.set()
        self._may_warm_up.set()
        self.channel.stop()

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
                self.assembly.take_apart()

    def _build(self) -> None:
        try:
            self.assembly.build(self._source)
        except BaseException as error:
            self.condition.change(EngineState.CLOSED, repr(error))
            self.built.set_exception(error)
            return
        self.built.set_result(None)

    def _serve(self) -> None:
        if self.assembly.scheduler is None:
            return
        self._may_warm_up.wait()
        try:
            if self.stopping.is_set():
                raise StopEngine
            with self._cache.limiter.held():
                self.assembly.warm_up(compile_programs=self._warmup)
        except BaseException as error:
            self._leave(error)
            return
        self.enter()
        self.warm.set_result(None)
        while (error := self._loop()) is not None:
            if not self._recover(error):
                break
        self._leave(None)

    def _loop(self) -> BaseException | None:
        """Run upstream's loop; returns what ended it, None for a stop."""
        while True:
            scheduler = self.scheduler
            try:
                scheduler.event_loop_normal()
            except StopEngine:
                return None
            except BaseException as error:
                self.channel.end_step()
                if self.condition.abandoned:
                    return error  # its requests and its jobs are gone: nothing is left to unload
                lost = scheduler.leaves.lost_by_owner()
                if not lost:
                    return error
            try:
                self.unload(
                    f"{len(lost)} weights ({lost[0]} …) were deleted or donated by who shared "
                    "them with update_weights; pass copy=True to keep a copy of them"
                )
            except EngineBroken as error:
                return error

    def _recover(self, error: BaseException) -> bool:
        """Do what becomes of an engine whose step failed, until it serves again; False if it
        stays out, and the condition says why."""
        self._quarantine(error, take_traceback(error))
        decision = self._supervisor.decide(self, error)
        while decision.action != "stay out":
            if self.stopping.wait(decision.delay):
                return False
            try:
                started = time.perf_counter()
                self._make_anew(decision)
                return self._supervisor.readmit(self, decision, time.perf_counter() - started)
            except Exception as cause:
                condition = self.condition
                reason = f"{condition.reason}; then {condition.state.value} failed: {cause!r}"
                condition.change(EngineState.QUARANTINED, reason, returns=True)
                decision = self._supervisor.recovery_failed(self, cause, take_traceback(cause))
        if decision.why is not None:
            reason = f"{self.condition.reason}; {decision.why}"
            self.condition.change(EngineState.QUARANTINED, reason)
        return False

    def _quarantine(self, error: BaseException, trace: str) -> None:
        """A step has failed: no request may stay here, no job will run."""
        reason = f"{type(error).__name__}: {error}"
        self.condition.change(EngineState.QUARANTINED, reason, returns=True)
        if isinstance(error, StepTimeout):
            return  # its requests were taken away when it was abandoned
        with self._queue.moving():
            requests = self.channel.close(f"engine {self.index} is quarantined: {reason}")
            self._queue.detach(self.index)
            self._supervisor.engine_failed(self, error, trace, requests)

    def _make_anew(self, decision: Decision) -> None:
        reason = self.condition.reason
        if decision.action == "reset":
            self.condition.change(EngineState.RESETTING, reason, returns=True)
            self.assembly.reset()
            return
        self.condition.change(EngineState.REBUILDING, reason, returns=True)
        source = self._supervisor.weights_for(self)
        kept = {} if source == "sibling" else self._intact()
        from_checkpoint = source == "checkpoint" and not kept
        self.assembly.rebuild(dummy_weights=not from_checkpoint)
        if kept:
            self.leaves.replace(kept)
        elif not from_checkpoint:
            self.condition.weights.update = -1  # `readmit` brings weights

    def _intact(self) -> dict[str, Any]:
        """The engine's own weights, for when no other engine has them."""
        if self.assembly.scheduler is None or self.leaves.lost():
            return {}
        return dict(self.leaves)

    def _leave(self, error: BaseException | None) -> None:
        """The thread ends."""
        condition = self.condition
        if condition.state is EngineState.QUARANTINED:
            condition.change(EngineState.QUARANTINED, condition.reason)
        else:
            condition.change(EngineState.CLOSED, None if error is None else repr(error))
        with self._queue.moving():
            requests = self.channel.close(f"engine {self.index} is {condition.state.value}")
            self._queue.detach(self.index)
            if not self.warm.done():
                self.warm.set_exception(error or StopEngine())
            self._supervisor.engine_closed(requests)

    # On the thread, called by the supervisor

    def enter(self) -> None:
        """From here on the engine does jobs, and gets requests if it has weights."""
        self.condition.change(EngineState.SERVING)
        self.channel.open()
        if self.condition.serving:
            self._queue.attach(self.index, self.channel.load, self.channel.wake)

    # On the thread, as jobs

    def unload(self, reason: str) -> None:
        """The engine has no weights: it takes no step until `load`, its requests move on."""
        self.condition.weights.missing = reason
        self.condition.change(EngineState.SERVING)  # from now on
        requests = self.channel.retract()
        self._queue.detach(self.index)
        self._supervisor.engine_unloaded(self, requests)

    def load(self) -> None:
        """The engine has weights again."""
        if self.condition.weights.missing is not None:
            self.condition.weights.missing = None
            self.condition.change(EngineState.SERVING)
            self._queue.attach(self.index, self.channel.load, self.channel.wake)
