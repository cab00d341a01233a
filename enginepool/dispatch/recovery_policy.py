"""What becomes of an engine that failed, and of the requests that it had: pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from enginepool.dispatch.fault_history import FaultHistory
from enginepool.errors import NotFinite

# Failures in a row, without a finished request in between, count for this long.
WINDOW_SECONDS = 60.0
# From this many in a row on, an engine is rebuilt instead of reset.
REBUILD_AFTER = 3
# A request that was present in so many failures, without an output token in between, runs alone;
# if that fails too, it ends.
MAX_FAILURES = 2


@dataclass(frozen=True)
class Policy:
    """`EnginePool`'s arguments of these names."""

    restart: bool
    max_restarts: int


@dataclass(frozen=True)
class Decision:
    """What becomes of an engine that failed.

    Attributes:
        action: "reset" makes the scheduler's state and the KV cache anew, in milliseconds;
            "rebuild" all of the engine; "stay out" neither.
        delay: Seconds to wait before.
        attempt: Which in a row this is, from 1.
        why: What keeps it out beside its own failure, if something does.
    """

    action: Literal["reset", "rebuild", "stay out"]
    delay: float = 0.0
    attempt: int = 1
    why: str | None = None


@dataclass(frozen=True)
class EngineHistory:
    """What led to a failure.

    Attributes:
        failures: How many in a row within `WINDOW_SECONDS`, this one included, without those
            that may be a request's doing: numbers that are not finite.
        not_made_anew: The last of them was a reset or a rebuild.
        weights_broken: What had no finite numbers here, alone, has had some elsewhere since.
    """

    failures: int
    not_made_anew: bool = False
    weights_broken: bool = False


def decide(error: BaseException, history: EngineHistory, policy: Policy) -> Decision:
    """Reset, rebuild or stay out, and after how long."""
    failures = history.failures
    if not policy.restart:
        return Decision("stay out", attempt=failures)
    if isinstance(error, NotFinite) and not history.weights_broken:
        return Decision("reset")
    if failures > policy.max_restarts:
        limit = f"max_restarts={policy.max_restarts} in {WINDOW_SECONDS:g} s are used up"
        return Decision("stay out", attempt=failures, why=limit)
    rebuild = history.not_made_anew or history.weights_broken or failures >= REBUILD_AFTER
    return Decision("rebuild" if rebuild else "reset", delay_before(failures), failures)


def delay_before(attempt: int) -> float:
    """Seconds to wait before a recovery, by which in a row it is: none, then growing."""
    return 0.0 if attempt <= 1 else 0.05 * 4.0 ** (attempt - 2)


def decide_request(
    faults: FaultHistory, *, pinned: bool, policy: Policy
) -> Literal["resume", "resume alone", "poisoned", "engine_failed"]:
    """What becomes of a request that was present in a failure, the last in its history."""
    if faults.count > MAX_FAILURES:
        return "poisoned"
    if pinned and not policy.restart:
        return "engine_failed"
    return "resume alone" if faults.count == MAX_FAILURES else "resume"


def decide_not_finite(
    faults: FaultHistory, *, again: bool, finite_on: Mapping[int, float]
) -> Literal["resume", "request", "weights"]:
    """What is at fault where the log-probability of a request that was alone is no finite number:
    nothing that would keep it from another try, the request, or the weights.

    Args:
        again: It is the second time under these weights.
        finite_on: When engines have last given finite numbers with the same weights, of those that
            may run it.
    """
    if not again:
        return "resume"
    tried = faults.nonfinite_on
    if any(finite_on.get(engine, 0.0) > when for engine, when in tried.items()):
        return "request"  # others had finite numbers there afterwards
    if finite_on.keys() - tried.keys():
        return "resume"
    # On two engines, or twice on the only one.
    return "request" if finite_on else "weights"
