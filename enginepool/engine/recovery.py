"""Recovers from an engine's failure: its requests are queued again, and the engine comes back.

`recovery_policy.py` decides. This module gathers what the decision needs, and carries it out on the
engine's own thread. An engine never comes back in the middle of a swap. `watchdog.py` finds a step
that does not return.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from enginepool.dispatch.condition import DesiredState
from enginepool.dispatch.dispatch import Dispatch
from enginepool.dispatch.events import EngineEvents
from enginepool.dispatch.fault_history import FaultHistory
from enginepool.dispatch.recovery_policy import (
    WINDOW_SECONDS,
    Decision,
    EngineHistory,
    Policy,
    decide,
    decide_not_finite,
    decide_request,
)
from enginepool.dispatch.request import Request, aborted, not_finite
from enginepool.dispatch.steering_lock import SteeringLock
from enginepool.engine.current_weights import CurrentWeights
from enginepool.engine.device_check import no_answer
from enginepool.engine.pinned_engine import PinnedEngine
from enginepool.errors import NotFinite, PoolClosed, StepTimeout


class Recovery:
    """What happens after an engine has failed. The engine's thread calls it, except `engine_stuck`.

    Args:
        engines: The pool's engines, in order. Empty until the pool opens.

    Attributes:
        weights: The weights that an engine gets when it comes back.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        policy: Policy,
        desired: DesiredState,
        steering: SteeringLock,
        events: EngineEvents,
        engines: Sequence[PinnedEngine],
    ) -> None:
        self._dispatch = dispatch
        self._policy = policy
        self._desired = desired
        self._steering = steering
        self._events = events
        self._engines = engines
        self.weights = CurrentWeights(desired, engines)
        self._times: dict[int, list[float]] = {}  # of failures, by engine
        # By engine: the requests that were alone there and got no finite numbers, each with the
        # update and the time.
        self._not_finite: dict[int, list[tuple[FaultHistory, int, float]]] = {}

    # The requests

    def engine_failed(
        self, engine: PinnedEngine, error: BaseException, trace: str, requests: list[Request]
    ) -> None:
        self._move_requests("engine_quarantined", engine, error, requests, exception=trace)

    def engine_stuck(self, engine: PinnedEngine, since: float, reason: str) -> None:
        """A step that began at `since` does not return. Called on another thread than the
        engine's."""
        with self._dispatch.queue.moving():
            requests = engine.channel.abandon(since, reason)
            if requests is not None:
                self._move_requests("engine_abandoned", engine, StepTimeout(reason), requests)

    def engine_unloaded(self, engine: PinnedEngine, requests: list[Request]) -> None:
        if self._desired.no_weights is None:  # otherwise a user released the weights
            self._warn("engine_unloaded", engine, requests=len(requests))
        self._dispatch.resume(requests)

    def engine_closed(self, requests: list[Request]) -> None:
        dispatch = self._dispatch
        if dispatch.closed:
            dispatch.fail(requests, PoolClosed(f"pool {dispatch.name!r} was closed"))
        else:
            dispatch.resume(requests)

    def _move_requests(
        self,
        event: str,
        engine: PinnedEngine,
        error: BaseException,
        requests: list[Request],
        **about: str,
    ) -> None:
        self._warn(event, engine, requests=len(requests), **about)
        if isinstance(error, NotFinite):
            self._dispatch.resume(self._sort_out_not_finite(engine, error, requests))
        else:
            self._dispatch.resume(self._sort_out(engine, requests))

    def _warn(self, event: str, engine: PinnedEngine, **about: object) -> None:
        reason = engine.condition.reason
        self._events.add(
            event, engine.index, engine.devices, level="warning", reason=reason, **about
        )

    def _sort_out(self, engine: PinnedEngine, requests: Sequence[Request]) -> list[Request]:
        """End those requests of a failed engine that must not run again. Returns the others."""
        movable = []
        for request in requests:
            faults = request.faults
            faults.add(engine.index, str(engine.condition.reason), len(request.output_ids))
            pinned = request.pinned_to is not None
            fate = decide_request(faults, pinned=pinned, policy=self._policy)
            if fate in ("poisoned", "engine_failed"):
                request.call.finish(request, aborted(str(faults), fate))
            else:
                faults.runs_alone = fate == "resume alone"
                movable.append(request)
        return movable

    def _sort_out_not_finite(
        self, engine: PinnedEngine, error: NotFinite, requests: Sequence[Request]
    ) -> list[Request]:
        """After non-finite numbers: end requests if they or their weights are at fault. Returns the
        others. A request that shared its step with others is first tried alone."""
        weights = engine.condition.weights
        movable = []
        for request in requests:
            fault = "resume"
            if request.internal_rid in error.requests:
                request.faults.starts_alone = True
                if error.alone:
                    fault = self._find_fault(engine, request)
            if fault == "weights":
                for other in self._engines:
                    other.condition.weights.nonfinite_under = weights.update
            if fault == "resume":
                movable.append(request)
            else:
                request.call.finish(request, not_finite(weights.version, request.adapter))
        return movable

    def _find_fault(
        self, engine: PinnedEngine, request: Request
    ) -> Literal["resume", "request", "weights"]:
        """Decide what is at fault after a request that was alone had no finite numbers."""
        weights, faults = engine.condition.weights, request.faults
        again = faults.add_not_finite(engine.index, str(engine.condition.reason), weights.update)
        seen = self._not_finite.get(engine.index, [])
        when = faults.nonfinite_on[engine.index]
        self._not_finite[engine.index] = [
            *(one for one in seen if one[1] == weights.update and one[2] > weights.finite_at),
            (faults, weights.update, when),
        ]
        finite_on = {
            other.index: other.condition.weights.finite_at
            for other in self._engines
            if other.condition.weights.finite_under == weights.update
            and other.condition.will_serve
            and request.pinned_to in (None, other.index)
        }
        again = again or weights.nonfinite_under == weights.update
        return decide_not_finite(faults, again=again, finite_on=finite_on)

    def _weights_are_broken(self, engine: PinnedEngine) -> bool:
        """Whether the engine's weights are the likely fault: a request that was alone on this
        engine got no finite numbers, later got finite numbers on another engine, and no request
        has got finite numbers on this engine since."""
        weights = engine.condition.weights
        return any(
            update == weights.update == faults.finite_under and when > weights.finite_at
            for faults, update, when in self._not_finite.get(engine.index, ())
        )

    # The engine

    def decide(self, engine: PinnedEngine, error: BaseException) -> Decision:
        broken = isinstance(error, NotFinite) and self._weights_are_broken(engine)
        if broken:
            del self._not_finite[engine.index]
        if isinstance(error, NotFinite) and not broken:
            return decide(error, EngineHistory(1), self._policy)
        return decide(error, self._history(engine, weights_broken=broken), self._policy)

    def recovery_failed(self, engine: PinnedEngine, error: Exception, trace: str) -> Decision:
        self._warn("engine_not_recovered", engine, exception=trace)
        return decide(error, self._history(engine, recovery_failed=True), self._policy)

    def stays_out(self, engine: PinnedEngine) -> None:
        self._warn("engine_stays_out", engine)

    def _history(self, engine: PinnedEngine, **about: bool) -> EngineHistory:
        policy = self._policy
        lost = no_answer(engine.devices, policy.step_timeout) if policy.restart else None
        return EngineHistory(self._count(engine), no_answer=lost, **about)

    def _count(self, engine: PinnedEngine) -> int:
        """Count a failure of this engine. Returns how many there are in a row."""
        now = time.perf_counter()
        since = max(engine.channel.running.last_end, now - WINDOW_SECONDS)
        times = self._times.get(engine.index, [])
        self._times[engine.index] = [at for at in times if at > since] + [now]
        return len(self._times[engine.index])

    def readmit(self, engine: PinnedEngine, decision: Decision, seconds: float) -> None:
        """Let an engine serve again, once no other call changes the pool.

        Raises:
            PoolClosed: The pool was closed.
        """
        made = time.perf_counter()
        with self._steering.hold("recovery"):
            # These weights are in place now. Nobody else reads `kept` without the steering lock.
            engine.kept = {}
            self._bring_up_to_date(engine)
            if engine.condition.weights.missing is None:
                self.weights.bring_from(engine)
            engine.enter()
        if engine.condition.weights.missing is not None:
            self._dispatch.fail_unserved()  # requests waited for this engine
            if self._desired.no_weights is None:
                self._warn("engine_unloaded", engine, requests=0)
        seconds += time.perf_counter() - made
        self._events.add(
            "engine_recovered",
            engine.index,
            engine.devices,
            by=decision.action,
            seconds=seconds,
            attempt=decision.attempt,
        )

    def _bring_up_to_date(self, engine: PinnedEngine) -> None:
        """Give the engine the current weights and the pool's pause reasons. The caller holds the
        steering lock."""
        condition, desired = engine.condition, self._desired
        condition.draining = False
        condition.pause_reasons = set(desired.pause_reasons)
        if engine.index in desired.paused_engines:
            condition.pause("paused")
        condition.weights.missing = desired.no_weights
        kv_cache = engine.scheduler.kv_cache
        if "kv_cache" in desired.pause_reasons:
            kv_cache.drop()
        else:
            kv_cache.rebuild()
        if desired.no_weights is None:
            self.weights.bring_to(engine)
        else:
            engine.leaves.drop(list(engine.leaves))
