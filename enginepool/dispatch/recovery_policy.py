"""Decides what happens to an engine that failed, and to its requests. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from enginepool.dispatch.fault_history import FaultHistory
from enginepool.errors import NotFinite

# An engine's failures are in a row if they lie within this time and no request finished in between.
WINDOW_SECONDS = 60.0
# After this many failures in a row an engine is rebuilt instead of reset.
REBUILD_AFTER = 3
# A request that was part of this many failures, without an output token in between, runs alone. If
# that fails too, the request ends.
MAX_FAILURES = 2


@dataclass(frozen=True)
class Policy:
    """`EnginePool`'s arguments of these names."""

    restart: bool
    max_restarts: int
    step_timeout: float | None = None


@dataclass(frozen=True)
class Decision:
    """The decision about an engine that failed.

    Attributes:
        action: "reset": replace the scheduler's state and the KV cache, in milliseconds.
            "rebuild": build the whole engine again. "stay out": do nothing.
        delay: Seconds to wait before the action.
        attempt: The number of this recovery in the row of failures, from 1.
        why: Why it stays out, if there is a reason other than its failure.
    """

    action: Literal["reset", "rebuild", "stay out"]
    delay: float = 0.0
    attempt: int = 1
    why: str | None = None


@dataclass(frozen=True)
class EngineHistory:
    """An engine's failures so far.

    Attributes:
        failures: How many failures in a row there were within `WINDOW_SECONDS`, this one included.
            A failure by non-finite numbers counts only with `weights_broken`. Otherwise a request
            may be the cause.
        recovery_failed: Whether the latest failure was a failed reset or rebuild.
        weights_broken: Whether the engine's weights are the likely fault: a request that was alone
            got no finite numbers on this engine, and later got finite ones on another engine.
        no_answer: The device that does not answer any more, and why. None if all answer.
    """

    failures: int
    recovery_failed: bool = False
    weights_broken: bool = False
    no_answer: str | None = None


def decide(error: BaseException, history: EngineHistory, policy: Policy) -> Decision:
    """Reset, rebuild or stay out, and after how long."""
    failures = history.failures
    if not policy.restart:
        return Decision("stay out", attempt=failures)
    if isinstance(error, NotFinite) and not history.weights_broken:
        return Decision("reset")
    if history.no_answer is not None:
        return Decision("stay out", attempt=failures, why=history.no_answer)
    if failures > policy.max_restarts:
        limit = f"max_restarts={policy.max_restarts} in {WINDOW_SECONDS:g} s are used up"
        return Decision("stay out", attempt=failures, why=limit)
    rebuild = history.recovery_failed or history.weights_broken or failures >= REBUILD_AFTER
    return Decision("rebuild" if rebuild else "reset", delay_before(failures), failures)


def delay_before(attempt: int) -> float:
    """Seconds to wait before a recovery: 0 for the first in a row, then more and more."""
    return 0.0 if attempt <= 1 else 0.05 * 4.0 ** (attempt - 2)


def decide_request(
    faults: FaultHistory, *, pinned: bool, policy: Policy
) -> Literal["resume", "resume alone", "poisoned", "engine_failed"]:
    """Decide what happens to a request after the latest failure in its history."""
    if faults.count > MAX_FAILURES:
        return "poisoned"
    if pinned and not policy.restart:
        return "engine_failed"
    return "resume alone" if faults.count == MAX_FAILURES else "resume"


def decide_not_finite(
    faults: FaultHistory, *, again: bool, finite_on: Mapping[int, float]
) -> Literal["resume", "request", "weights"]:
    """Decide whether a request or the weights are at fault. The request was alone in a step and got
    a log-probability that is not finite.

    "resume" means that this is not known yet, and the request is tried again.

    Args:
        again: Whether it is the request's second time under these weights, or the weights are
            already known to be at fault.
        finite_on: The engines that may run the request and had finite numbers with these weights,
            each with the latest time.
    """
    if not again:
        return "resume"
    tried = faults.nonfinite_on
    if any(finite_on.get(engine, 0.0) > when for engine, when in tried.items()):
        return "request"  # other requests got finite numbers there afterwards
    if finite_on.keys() - tried.keys():
        return "resume"
    # It failed on two engines, or twice on the only one, or the weights are known to be at fault.
    return "request" if finite_on else "weights"
