"""`EngineCondition`: the condition of one engine. `DesiredState`: what all engines should have."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

# Why an engine takes no step: a user's pause, new weights, a KV cache whose memory was released.
PauseReason = Literal["paused", "swap", "kv_cache"]
# What happens to running requests when generation pauses.
PauseMode = Literal["retract", "in_place", "abort"]


class EngineState(Enum):
    """The state of an engine, as `stats()` shows it."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"  # it finishes its requests before a swap of weights
    PAUSED = "paused"
    UNLOADED = "unloaded"  # it has no weights; the next update_weights brings them
    QUARANTINED = "quarantined"  # a step failed; it gets no requests
    RESETTING = "resetting"  # its scheduler state and KV cache are replaced
    REBUILDING = "rebuilding"  # the whole engine is built again
    ABANDONED = "abandoned"  # a step does not return
    CLOSED = "closed"


@dataclass
class DesiredState:
    """The state that every engine of a pool should have. A recovering engine is brought to it.

    A thread that holds the `SteeringLock` writes it. Any thread may read it.

    Attributes:
        weight_version: The label of the weights.
        update: The number of the update that brought them. 0 is the checkpoint.
        no_weights: Why no engine has weights, if a user released them.
        pause_reasons: Why no engine takes a step.
        paused_engines: The engines that a caller paused one by one.
    """

    weight_version: int | str = 0
    update: int = 0
    no_weights: str | None = None
    pause_reasons: set[PauseReason] = field(default_factory=set)
    paused_engines: set[int] = field(default_factory=set)

    @property
    def paused(self) -> bool:
        """Whether a caller has paused any engine."""
        return "paused" in self.pause_reasons or bool(self.paused_engines)


@dataclass(frozen=True)
class _Phase:
    state: EngineState
    reason: str | None = None
    recovering: bool = False
    since: float = field(default_factory=time.time)


@dataclass
class WeightsCondition:
    """The weights of one engine. Written on the engine's thread, with two exceptions. The thread
    that finds non-finite numbers writes `nonfinite_under` of all engines. A recovered engine also
    gives its weights to engines that have none. If that fails, its thread writes their `missing`.

    Attributes:
        version: The label that tokens of the engine's next step carry.
        update: The number of the update that brought the weights. Prefix-cache entries of different
            updates are separate. -1: the weights came from no update.
        missing: Why the engine has no weights. None if it has them.
        being_replaced: Whether an update is being put in place. Leaves may then be old or new.
        finite_under: The last update under which a request got finite numbers on this engine.
        finite_at: When that was, in `time.perf_counter`.
        nonfinite_under: The last update under which no engine gave finite numbers.
    """

    version: int | str = 0
    update: int = 0
    missing: str | None = None
    being_replaced: bool = False
    finite_under: int | None = None
    finite_at: float = 0.0
    nonfinite_under: int | None = None

    def record_update(self, version: int | str, update: int) -> None:
        """Record that the engine has the weights of this update now."""
        self.version, self.update = version, update
        self.being_replaced = False

    def record_finite(self) -> None:
        """Record that a request got finite numbers from these weights."""
        self.finite_under, self.finite_at = self.update, time.perf_counter()
        if self.nonfinite_under == self.update:
            self.nonfinite_under = None


class EngineCondition:
    """The condition of one engine: what it does, what it may do, and why.

    Only the package `engine/` writes it: on the engine's thread, or, while a step does not return,
    on the thread that abandons the step. Any thread may read it. `change` replaces state and reason
    together, so no reader sees half of a change. Everything else is a single value.

    Attributes:
        weights: The weights that it has.
        pause_reasons: Why it takes no step. Empty while it may step.
        draining: Whether it takes no new requests and only finishes requests that have begun.
        kv_not_finite: Whether the KV cache may hold numbers that are not finite.
        stepping_since: When the current step began, in `time.perf_counter`. None between steps.
    """

    def __init__(self) -> None:
        self._phase = _Phase(EngineState.STARTING)
        self.weights = WeightsCondition()
        self.pause_reasons: set[PauseReason] = set()
        self.draining = False
        self.kv_not_finite = False
        self.stepping_since: float | None = None

    def __repr__(self) -> str:
        return f"<EngineCondition {self.state.value}: {self.reason}>"

    def change(
        self, state: EngineState, reason: str | None = None, *, recovering: bool = False
    ) -> None:
        """Set what the engine does from now on.

        Args:
            recovering: Whether the engine has failed and will probably serve again.
        """
        self._phase = _Phase(state, reason, recovering)

    def pause(self, reason: PauseReason) -> None:
        """Add a reason to take no step."""
        self.pause_reasons.add(reason)

    def go_on(self, reason: PauseReason) -> None:
        """Remove a reason to take no step. Other reasons may remain."""
        self.pause_reasons.discard(reason)

    # What it is doing

    @property
    def state(self) -> EngineState:
        """The state that users see. A paused engine still does jobs, but takes no step."""
        state = self._phase.state
        if state is not EngineState.SERVING:
            return state
        if self.weights.missing is not None:
            return EngineState.UNLOADED
        if self.pause_reasons:
            return EngineState.PAUSED
        return EngineState.DRAINING if self.draining else EngineState.SERVING

    @property
    def reason(self) -> str | None:
        """Why it is in its state, if the state needs a reason."""
        phase = self._phase
        loop_runs = phase.state is EngineState.SERVING
        return self.weights.missing if loop_runs else phase.reason

    @property
    def since(self) -> float:
        """When it entered its state, as `time.time`. If it is paused or drains: when it began to
        serve."""
        return self._phase.since

    # What it may do

    @property
    def reachable(self) -> bool:
        """Whether its loop runs and does jobs."""
        return self._phase.state is EngineState.SERVING

    @property
    def serving(self) -> bool:
        """Whether it may get requests."""
        return self.reachable and self.weights.missing is None

    @property
    def recovering(self) -> bool:
        """Whether it has failed and will probably serve again."""
        return self._phase.recovering

    @property
    def will_serve(self) -> bool:
        """Whether requests may wait for it, because it serves or will serve again."""
        phase = self._phase  # read once: another thread may replace it
        loop_runs = phase.state is EngineState.SERVING
        return phase.recovering or (loop_runs and self.weights.missing is None)

    @property
    def paused(self) -> bool:
        """Whether there is a reason to take no step."""
        return bool(self.pause_reasons)

    @property
    def may_step(self) -> bool:
        """Whether it takes a step when it has work."""
        return not self.pause_reasons and self.weights.missing is None

    def takes(self, *, begun: bool) -> bool:
        """Whether it takes requests now.

        Args:
            begun: Whether they have begun. A draining engine takes no others.
        """
        return self.may_step and (begun or not self.draining)

    @property
    def abandoned(self) -> bool:
        """Whether its requests were taken away because a step does not return."""
        return self._phase.state is EngineState.ABANDONED
