"""What happens to an engine that failed and to its requests: the decisions alone, without an
engine."""

import math
from typing import Any

import pytest

from enginepool.dispatch.fault_history import FaultHistory
from enginepool.dispatch.recovery_policy import (
    Decision,
    EngineHistory,
    Policy,
    decide,
    decide_not_finite,
    decide_request,
)
from enginepool.errors import NotFinite

POLICY = Policy(restart=True, max_restarts=5)
FAULT, NOT_FINITE = RuntimeError("no device"), NotFinite([])
# These times are before and after all failures here, in `time.perf_counter`.
BEFORE, AFTER = 0.0, math.inf


def history(*failures: tuple[int, int]) -> FaultHistory:
    """The failures that a request was in: the engine, and how many outputs the request had."""
    faults = FaultHistory()
    for engine_index, outputs in failures:
        faults.add(engine_index, "no device", outputs)
    return faults


def test_an_engine_is_reset_twice_and_then_rebuilt() -> None:
    """It is reset at once the first time. Later pauses are four times as long as the last."""
    decisions = [decide(FAULT, EngineHistory(failures), POLICY) for failures in range(1, 6)]
    assert [one.action for one in decisions] == ["reset"] * 2 + ["rebuild"] * 3
    assert [one.delay for one in decisions] == pytest.approx([0.0, 0.05, 0.2, 0.8, 3.2])
    assert [one.attempt for one in decisions] == [1, 2, 3, 4, 5]
    assert all(one.why is None for one in decisions)


def test_an_engine_that_failed_too_often_stays_out_and_says_the_limit() -> None:
    last = decide(FAULT, EngineHistory(6), POLICY)
    assert last == Decision("stay out", attempt=6, why="max_restarts=5 in 60 s are used up")
    assert (
        decide(FAULT, EngineHistory(1), Policy(restart=True, max_restarts=0)).action == last.action
    )


def test_an_engine_whose_device_does_not_answer_stays_out_and_says_so() -> None:
    found = decide(FAULT, EngineHistory(1, no_answer="device 3 is gone"), POLICY)
    assert found == Decision("stay out", attempt=1, why="device 3 is gone")


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("error", [FAULT, NOT_FINITE])
def test_nothing_comes_back_without_restart(error: Any, made: bool) -> None:
    """The message names no limit that does not apply."""
    policy = Policy(restart=False, max_restarts=5)
    found = decide(error, EngineHistory(1, recovery_failed=not made), policy)
    assert (found.action, found.why) == ("stay out", None)


def test_an_engine_whose_reset_failed_is_rebuilt() -> None:
    """Already at its first failure."""
    found = decide(FAULT, EngineHistory(2, recovery_failed=True), POLICY)
    assert (found.action, found.delay) == ("rebuild", 0.05)


@pytest.mark.parametrize("failures", [1, 4, 6])
def test_numbers_that_are_not_finite_are_no_failure_of_the_engine(failures: int) -> None:
    """A request may be the cause, however many failures there were."""
    assert decide(NOT_FINITE, EngineHistory(failures), POLICY) == Decision("reset")


def test_an_engine_whose_weights_are_broken_is_rebuilt() -> None:
    """It is rebuilt at once, because a reset cannot help. This counts as a failure."""
    found = decide(NOT_FINITE, EngineHistory(1, weights_broken=True), POLICY)
    assert found == Decision("rebuild")
    assert decide(NOT_FINITE, EngineHistory(6, weights_broken=True), POLICY).action == "stay out"


@pytest.mark.parametrize(
    ("failures", "fate"),
    [
        ([(0, 0)], "resume"),
        ([(0, 0), (1, 0)], "resume alone"),
        ([(0, 0), (1, 0), (2, 0)], "poisoned"),
        ([(0, 0), (1, 0), (1, 0)], "poisoned"),
        ([(0, 0), (1, 0), (2, 3)], "resume"),  # it has more tokens: the first failure of a new row
        ([(0, 3), (1, 3), (2, 4), (0, 4)], "resume alone"),
    ],
)
def test_a_request_that_was_in_failures(failures: list[tuple[int, int]], fate: str) -> None:
    """It runs alone after two failures without a token in between. It ends after three."""
    assert decide_request(history(*failures), pinned=False, policy=POLICY) == fate
    assert decide_request(history(*failures), pinned=True, policy=POLICY) == fate


def test_a_pinned_request_ends_with_its_engine_without_restart() -> None:
    """Other requests continue on other engines."""
    policy = Policy(restart=False, max_restarts=5)
    assert decide_request(history((0, 0)), pinned=True, policy=policy) == "engine_failed"
    assert decide_request(history((0, 0)), pinned=False, policy=policy) == "resume"


def test_a_request_keeps_away_from_engines_that_failed_with_it() -> None:
    """Unless it has failed on all serving engines."""
    faults = history((0, 0), (2, 1))
    assert [faults.may_run_on(i, {0, 1, 2}) for i in range(3)] == [False, True, False]
    assert [faults.may_run_on(i, {0, 2}) for i in range(3)] == [True, True, True]
    assert str(faults) == "engine 0: no device; engine 2: no device"


@pytest.mark.parametrize(
    ("engines", "finite_on", "fault"),
    [
        ([0], {}, "resume"),  # once proves nothing
        ([0], {0: AFTER}, "resume"),
        ([0, 1], {}, "weights"),  # on two engines, and no other request had finite numbers on them
        ([0, 0], {}, "weights"),  # twice on the only one
        ([0, 1], {1: BEFORE}, "request"),  # others had finite numbers where it failed
        ([0, 1], {2: AFTER}, "resume"),  # an engine is left that has shown that its weights work
        ([0, 1], {0: BEFORE, 2: AFTER}, "resume"),  # weights may have broken since
        ([0, 1], {0: AFTER, 2: AFTER}, "request"),  # not broken: others had finite numbers later
    ],
)
def test_whose_fault_numbers_that_are_not_finite_are(
    engines: list[int], finite_on: dict[int, float], fault: str
) -> None:
    faults, found = FaultHistory(), ""
    for engine_index in engines:
        again = faults.add_not_finite(engine_index, "not finite", update=7)
        found = decide_not_finite(faults, again=again, finite_on=finite_on)
    assert found == fault


def test_failures_under_earlier_weights_do_not_count() -> None:
    """A failure under earlier weights does not count for new ones."""
    faults = FaultHistory()
    assert not faults.add_not_finite(0, "not finite", update=1)
    assert not faults.add_not_finite(0, "not finite", update=2)
    assert faults.add_not_finite(0, "not finite", update=2)


def test_a_suspect_is_none_once_it_had_finite_numbers() -> None:
    """A later failure concerns tokens that it did not have before."""
    faults = FaultHistory()
    assert not faults.add_not_finite(0, "not finite", update=1)
    assert faults.starts_alone
    faults.record_finite(update=1)
    assert not faults.starts_alone
    assert faults.finite_under == 1
    assert not faults.add_not_finite(1, "not finite", update=1)
    assert faults.finite_under is None
