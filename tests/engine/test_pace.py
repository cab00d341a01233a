"""A launch has one decode step, unless the device waits for the host."""

import pytest

from enginepool.engine.steady.pace import Pace


def launch(pace: Pace, times: int, *, idle: bool) -> list[int]:
    """Returns how many steps each launch has."""
    steps = []
    for _ in range(times):
        pace.launched(idle=idle)
        steps.append(pace.steps(without_delay=1))
    return steps


def test_one_step_a_launch_while_the_device_has_work() -> None:
    assert set(launch(Pace(8), 1000, idle=False)) == {1}


def test_several_steps_where_the_device_waits_and_one_is_tried_again() -> None:
    pace = Pace(8)
    assert launch(pace, 2, idle=True) == [1, 8]
    assert launch(pace, 128, idle=False) == [8] * 127 + [1]
    assert launch(pace, 2, idle=True)[-1] == 8


def test_the_device_may_wait_now_and_then() -> None:
    pace = Pace(8)
    for _ in range(20):
        assert set(launch(pace, 1, idle=True) + launch(pace, 15, idle=False)) == {1}


@pytest.mark.parametrize("idle", [True, False])
def test_never_more_steps_than_allowed(idle: bool) -> None:
    assert set(launch(Pace(1), 1000, idle=idle)) == {1}


def test_few_where_outputs_are_short() -> None:
    """A launch has at most a sixteenth of an output's steps, because a row that has ended stays
    empty until the launch ends."""
    pace = Pace(8)
    launch(pace, 2, idle=True)
    for tokens, most in ((40, 2), (10, 1), (1, 1), (200, 8)):
        for _ in range(100):
            pace.ended(tokens)
        assert pace.steps(without_delay=1) == pace.steps(without_delay=8) == most


@pytest.mark.parametrize(
    ("milliseconds", "most"), [(2, 8), (5.3, 8), (10.5, 4), (20.5, 2), (30, 1), (50, 1)]
)
def test_about_40_ms_of_steps_where_nobody_waits(milliseconds: float, most: int) -> None:
    """Only while no request streams and none waits to join."""
    pace = Pace(8)
    assert pace.steps(without_delay=8) == 1  # nothing is known yet
    for _ in range(100):
        pace.took(milliseconds / 1000)
    assert pace.steps(without_delay=8) == most
    assert pace.steps(without_delay=1) == 1
    for _ in range(100):
        pace.took(0.1)
    assert pace.steps(without_delay=8) == 1
