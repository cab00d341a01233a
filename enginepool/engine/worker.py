"""One engine's thread: builds the engine, warms it up, runs its loop, takes it apart.

When a step fails the thread hands over what the engine held, asks its supervisor to bring the
engine back (`recovery.py`), and runs the loop again.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import jax

from enginepool.engine.build import Assembly
from enginepool.engine.channel import Channel
from enginepool.engine.executable_cache import ExecutableCache
from enginepool.engine.jobs import EngineBroken, StopEngine
from enginepool.engine.limiter import process_turns
from enginepool.engine.states import EngineState
from enginepool.errors import StepTimeout
from enginepool.requests.queue import RequestQueue
from enginepool.requests.request import Request

if TYPE_CHECKING:
    from sgl_jax.srt.entrypoints.engine import Engine

    from enginepool.weights.leaves import EngineLeaves


_current = threading.local()


def on_engine_thread() -> bool:
    """Whether the calling thread is an engine's, of whichever pool."""
    return getattr(_current, "is_engine", False)


class Supervisor(Protocol):
    """Whom a worker reports to; each is told on the worker's thread."""

    def engine_failed(
        self, worker: EngineWorker, error: BaseException, trace: str, requests: list[Request]
    ) -> None:
        """A step failed; the requests are out of the engine.

        Args:
            trace: The error's traceback, as Python prints it.
        """

    def recover(self, worker: EngineWorker, error: BaseException) -> bool:
        """Bring a failed engine back; False if it stays out."""
        ...

    def engine_unloaded(self, worker: EngineWorker, requests: list[Request]) -> None:
        """An engine has lost its weights; the requests are out of it."""

    def engine_closed(self, requests: list[Request]) -> None:
        """An engine's thread ends; no engine has these requests."""


@dataclass(frozen=True)
class _Condition:
    """What an engine does, and why. Replaced as a whole: who looks from another thread never sees
    half of a change.

    Attributes:
        returns: Whether the engine has failed and will probably serve again.
        since: When it came into this state, as `time.time`.
    """

    state: EngineState
    reason: str | None = None
    returns: bool = False
    since: float = field(default_factory=time.time)


class EngineWorker:
    """A thread pinned to one engine's devices. The thread starts with `start()`.

    Attributes:
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
        supervisor: Supervisor,
    ) -> None:
        self.index = index
        self.devices = tuple(devices)
        self.channel = Channel(index, queue, process_turns())
        self.assembly = Assembly(server_args, self.devices, self.channel)
        self.built: Future[None] = Future()
        self.warm: Future[None] = Future()
        self.stopping = threading.Event()
        self._condition = _Condition(EngineState.STARTING)
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
        return f"<EngineWorker {self.index} device {devices} [{self.state.value}, {held} running]>"

    @property
    def engine(self) -> Engine | None:
        """Upstream's Engine; see `Assembly`."""
        return self.assembly.engine

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

    @property
    def state(self) -> EngineState:
        """What the engine does; a paused one serves, but takes no step."""
        state = self._condition.state
        if state is not EngineState.SERVING:
            return state
        if self.channel.weightless is not None:
            return EngineState.UNLOADED
        if self.channel.stops:
            return EngineState.PAUSED
        return EngineState.DRAINING if self.channel.draining else EngineState.SERVING

    @property
    def reason(self) -> str | None:
        """Why the engine is in its state, for states that need one."""
        return self._condition.reason

    @property
    def since(self) -> float:
        """When the engine came into its state, as `time.time`."""
        return self._condition.since

    def change(
        self, state: EngineState, reason: str | None = None, *, returns: bool = False
    ) -> None:
        """Say what the engine does from now on.

        Args:
            returns: It has failed and will probably serve again.
        """
        self._condition = _Condition(state, reason, returns)

    @property
    def present(self) -> bool:
        """Whether the engine's loop runs, so that jobs are done."""
        return self._condition.state is EngineState.SERVING

    @property
    def serving(self) -> bool:
        """Whether the engine may be given requests."""
        return self.present and self.channel.weightless is None

    @property
    def recovering(self) -> bool:
        """Whether the engine has failed and will probably serve again."""
        return self._condition.returns

    @property
    def expected(self) -> bool:
        """Whether requests may wait for this engine: it serves, or will again."""
        condition = self._condition  # one look: it may come back between two
        loop_runs = condition.state is EngineState.SERVING
        return condition.returns or (loop_runs and self.channel.weightless is None)

    @property
    def stuck(self) -> bool:
        """Whether a step has not returned and its requests were taken away."""
        return self._condition.state is EngineState.ABANDONED

    def join(self, timeout: float | None) -> bool:
        """Wait for the thread to end; False if it is still there after `timeout` seconds."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def abandon(self, since: float, reason: str) -> list[Request] | None:
        """Take away the requests of a step that does not return, from another thread; None if
        the step that began at `since` has returned.

        When it returns after all its outcome is ignored, and the engine is reset.
        """
        with self.channel.books.lock:  # it may return just now
            requests = self.channel.abandon(since, f"engine {self.index} is abandoned: {reason}")
            if requests is None:
                return None
            self.change(EngineState.ABANDONED, reason)
            self._queue.detach(self.index)
            return requests

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
            self.change(EngineState.CLOSED, repr(error))
            self.built.set_exception(error)
            return
        self.built.set_result(None)

    def _serve(self) -> None:
        if self.channel.scheduler is None:
            return
        self._may_warm_up.wait()
        try:
            if self.stopping.is_set():
                raise StopEngine
            with self._cache.turns.taken():
                self.assembly.warm_up(compile_programs=self._warmup)
        except BaseException as error:
            self._leave(error)
            return
        self.enter()
        self.warm.set_result(None)
        while (error := self._loop()) is not None:
            self._fail(error, _take_traceback(error))
            if not self._supervisor.recover(self, error):
                break
        self._leave(None)

    def _loop(self) -> BaseException | None:
        """Run upstream's loop; returns what ended it, None for a stop."""
        while True:
            scheduler: Any = self.channel.scheduler
            try:
                scheduler.event_loop_normal()
            except StopEngine:
                return None
            except BaseException as error:
                self.channel.turns.give()
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

    def _fail(self, error: BaseException, trace: str) -> None:
        """A step has failed: no request may stay here, no job will run."""
        reason = f"{type(error).__name__}: {error}"
        self.change(EngineState.QUARANTINED, reason, returns=True)
        if isinstance(error, StepTimeout):
            return  # its requests were taken away when it was abandoned
        with self._queue.moving():
            requests = self.channel.close(f"engine {self.index} is quarantined: {reason}")
            self._queue.detach(self.index)
            self._supervisor.engine_failed(self, error, trace, requests)

    def _leave(self, error: BaseException | None) -> None:
        """The thread ends."""
        if self._condition.state is EngineState.QUARANTINED:
            self.change(EngineState.QUARANTINED, self.reason)
        else:
            self.change(EngineState.CLOSED, None if error is None else repr(error))
        with self._queue.moving():
            requests = self.channel.close(f"engine {self.index} is {self.state.value}")
            self._queue.detach(self.index)
            if not self.warm.done():
                self.warm.set_exception(error or StopEngine())
            self._supervisor.engine_closed(requests)

    # On the thread, called by the supervisor

    def enter(self) -> None:
        """From here on the engine gets requests and does jobs."""
        self.change(EngineState.SERVING)
        self.channel.open()
        self._queue.attach(self.index, self.channel.load, self.channel.wake)

    # On the thread, as jobs

    def unload(self, reason: str) -> None:
        """The engine has no weights: it takes no step until `load`, its requests move on."""
        self.channel.weightless = reason
        self.change(EngineState.SERVING, reason)
        requests = self.channel.take_back()
        self._queue.detach(self.index)
        self._supervisor.engine_unloaded(self, requests)

    def load(self) -> None:
        """The engine has weights again."""
        if self.channel.weightless is not None:
            self.channel.weightless = None
            self.change(EngineState.SERVING)
            self._queue.attach(self.index, self.channel.load, self.channel.wake)


def _take_traceback(error: BaseException) -> str:
    """The traceback as Python prints it. The error keeps none: its frames hold buffers."""
    trace = "".join(traceback.format_exception(error))
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        seen.append(link)
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return trace
