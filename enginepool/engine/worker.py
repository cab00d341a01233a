"""An engine's thread: builds the engine, warms it up, runs its loop, takes it apart.

When a step fails, the thread gives the engine's requests back, does what `recovery.py` decides, and
runs the loop again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import jax

from enginepool.dispatch.condition import EngineState
from enginepool.dispatch.queue import RequestQueue
from enginepool.dispatch.recovery_policy import Decision
from enginepool.engine.executable_cache import ExecutableCache
from enginepool.engine.jobs import EngineBroken, StopEngine
from enginepool.engine.pinned_engine import PinnedEngine
from enginepool.engine.recovery import Recovery
from enginepool.errors import PoolClosed, StepTimeout
from enginepool.logs import take_traceback
from enginepool.lora.adapter import Adapters

if TYPE_CHECKING:
    from enginepool.weights.leaves import EngineLeaves


_current = threading.local()


def on_engine_thread() -> bool:
    """Whether the calling thread is the thread of an engine, in any pool."""
    return getattr(_current, "is_engine", False)


class EngineWorker(PinnedEngine):
    """A thread pinned to one engine's devices. The thread starts with `start()`.

    Attributes:
        built: Resolves when the engine is built. Fails with the error of the build.
        warm: The same for the warm-up.
        stopping: Set when the thread should end.
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
        recovery: Recovery,
        max_decode_steps: int,
        adapters: Adapters,
    ) -> None:
        super().__init__(
            index,
            devices,
            server_args,
            queue,
            max_decode_steps=max_decode_steps,
            adapters=adapters,
        )
        self.built: Future[None] = Future()
        self.warm: Future[None] = Future()
        self.stopping = threading.Event()
        self._cache = cache
        self._recovery = recovery
        self._may_warm_up = threading.Event()
        self._warmup = True
        self._source: EngineLeaves | None = None
        self._kept_shared: set[str] = set()  # which of `kept` somebody else may delete
        # A daemon, so that a script which forgets to close exits; `close()` joins it.
        self._thread = threading.Thread(
            target=self._main, name=f"{name}-engine-{index}", daemon=True
        )

    def start(self, source: EngineLeaves | None = None) -> None:
        """Start the thread, which builds the engine. Weights are copied from `source`, if given."""
        self._source = source
        self._thread.start()

    def warm_up(self, *, compile_programs: bool) -> None:
        """Let a built engine warm up and serve. `warm` resolves when it does."""
        self._warmup = compile_programs
        self._may_warm_up.set()

    def stop(self) -> None:
        """End the thread at the engine's next step boundary. If it does not serve yet, end it after
        the build or the warm-up."""
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
        with self._cache.sharing(), jax.default_device(self.devices[0]):
            try:
                self._build()
                with self.assembly.precision.on_this_thread():
                    self._serve()
            finally:
                self.kept = {}
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
        """Run upstream's loop. Returns the error that ended it; None for a stop."""
        while True:
            scheduler = self.scheduler
            try:
                scheduler.event_loop_normal()
            except StopEngine:
                return None
            except BaseException as error:
                self.channel.limiter.release()  # the loop has ended: no step boundary releases it
                if self.condition.abandoned:
                    return error  # its requests were taken away: there is nothing to unload
                lost = scheduler.leaves.lost_by_owner()
                if not lost:
                    return error
            try:
                self.unload(
                    f"{len(lost)} weights ({lost[0]} …) that update_weights shares were deleted or "
                    "donated by their owner; pass copy=True to keep a copy of them"
                )
            except EngineBroken as error:
                return error

    def _recover(self, error: BaseException) -> bool:
        """Recover from a failed step, until the engine serves again. Returns False if it stays out;
        the condition says why."""
        self._quarantine(error, take_traceback(error))
        decision = self._recovery.decide(self, error)
        while decision.action != "stay out":
            if self.stopping.wait(decision.delay):
                return False
            try:
                started = time.perf_counter()
                self._reset_or_rebuild(decision)
                self._recovery.readmit(self, decision, time.perf_counter() - started)
                return True
            except PoolClosed:
                return False
            except Exception as cause:
                condition = self.condition
                reason = f"{condition.reason}; then {condition.state.value} failed: {cause!r}"
                condition.change(EngineState.QUARANTINED, reason, recovering=True)
                decision = self._recovery.recovery_failed(self, cause, take_traceback(cause))
        if decision.why is not None:
            reason = f"{self.condition.reason}; {decision.why}"
            self.condition.change(EngineState.QUARANTINED, reason)
            self._recovery.stays_out(self)
        return False

    def _quarantine(self, error: BaseException, trace: str) -> None:
        """After a failed step: take the requests out, and run no more jobs."""
        reason = f"{type(error).__name__}: {error}"
        with self.queue.moving():
            self.condition.change(EngineState.QUARANTINED, reason, recovering=True)
            if isinstance(error, StepTimeout):
                return  # its requests were taken away when it was abandoned
            requests = self.channel.close(f"engine {self.index} is quarantined: {reason}")
            self.queue.detach(self.index)
            self._recovery.engine_failed(self, error, trace, requests)

    def _reset_or_rebuild(self, decision: Decision) -> None:
        reason = self.condition.reason
        if decision.action == "reset":
            self.condition.change(EngineState.RESETTING, reason, recovering=True)
            self.assembly.reset()
            return
        source = self._recovery.weights.source_for(self)
        if source == "sibling":
            self.kept = {}
        elif not self.kept:  # an earlier attempt may have kept them
            self.kept, self._kept_shared = self._intact(), set(self.leaves.shared)
        self.condition.change(EngineState.REBUILDING, reason, recovering=True)
        from_checkpoint = source == "checkpoint" and not self.kept
        self.assembly.rebuild(dummy_weights=not from_checkpoint)
        if self.kept:
            self.leaves.replace(self.kept, self._kept_shared)
        else:  # -1: dummy weights, until `readmit` brings others. An earlier attempt may have set 0
            self.condition.weights.update = 0 if from_checkpoint else -1

    def _intact(self) -> dict[str, jax.Array]:
        """The engine's own weights, if they are the pool's current ones. Weights that an earlier
        rebuild put in place are not current."""
        if self.assembly.scheduler is None or self.leaves.lost():
            return {}
        if not self._recovery.weights.are_current(self):
            return {}
        return dict(self.leaves)

    def _leave(self, error: BaseException | None) -> None:
        """End the thread."""
        condition = self.condition
        if condition.state is EngineState.QUARANTINED:
            condition.change(EngineState.QUARANTINED, condition.reason)
        else:
            condition.change(EngineState.CLOSED, None if error is None else repr(error))
        with self.queue.moving():
            requests = self.channel.close(f"engine {self.index} is {condition.state.value}")
            self.queue.detach(self.index)
            if not self.warm.done():
                self.warm.set_exception(error or StopEngine())
            self._recovery.engine_closed(requests)

    # On the thread, as a job

    def unload(self, reason: str) -> None:
        """Record that the engine has no weights. It takes no step until `load`, and its requests go
        back to the queue."""
        self.condition.weights.missing = reason
        self.condition.change(EngineState.SERVING)  # sets `since` to now
        requests = self.channel.retract()
        self.queue.detach(self.index)
        self._recovery.engine_unloaded(self, requests)
