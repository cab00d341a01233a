"""Group advantages, against loops over groups."""

from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginepool import InvalidRequest, rl

REWARDS = st.floats(-1e3, 1e3).map(lambda x: round(x, 3))
SAMPLES = st.lists(st.tuples(REWARDS, st.integers(0, 4), st.booleans()), max_size=40)


def by_loop(samples: list[tuple[float, int, bool]], epsilon: float | None) -> list[float]:
    """The same by Python's `statistics`."""
    advantages = []
    for reward, index, counts in samples:
        group = [r for r, i, c in samples if i == index and c]
        if not counts or len(group) < 2:
            advantages.append(0.0)
            continue
        scale = 1.0 if epsilon is None else stdev(group) + epsilon
        advantages.append((reward - mean(group)) / scale)
    return advantages


@settings(deadline=None)
@given(samples=SAMPLES, divides=st.booleans())
def test_as_a_loop_over_groups_has_it(samples: list[Any], divides: bool) -> None:
    """In any order and with any group sizes, some samples left out."""
    rewards, groups, valid = (
        (list(column) for column in zip(*samples, strict=True)) if samples else ([], [], [])
    )
    got = rl.group_advantages(rewards, groups, valid=valid, divide_by_std=divides, epsilon=0.01)
    assert got.dtype == np.float32
    expected = by_loop(samples, 0.01 if divides else None)
    assert got == pytest.approx(np.array(expected), rel=1e-5, abs=1e-6)


def test_groups_may_have_names() -> None:
    """As verl's uid."""
    named = rl.group_advantages([1.0, 0.0, 3.0, 4.0], ["a", "b", "a", "b"])
    assert named.tolist() == rl.group_advantages([1.0, 0.0, 3.0, 4.0], [0, 1, 0, 1]).tolist()
    assert named.any()


@settings(deadline=None)
@given(reward=st.floats(-1e12, 1e12), size=st.integers(1, 9))
def test_a_group_of_equal_rewards_gets_exactly_zero(reward: float, size: int) -> None:
    """Even if the mean is rounded."""
    assert not rl.group_advantages([reward] * size, [5] * size).any()


def test_what_is_left_out_may_be_anything() -> None:
    """The reward of an aborted sample is not read."""
    rewards = [1.0, float("nan"), 0.0, 5.0]
    got = rl.group_advantages(
        rewards, [0, 0, 0, 1], valid=[True, False, True, True], divide_by_std=False
    )
    assert got.tolist() == [0.5, 0.0, -0.5, 0.0]


@pytest.mark.parametrize(
    ("rewards", "groups", "said"),
    [
        ([1.0, float("inf")], [3, 4], "prompt 4: sample 1 has reward inf"),
        ([1.0, float("inf")], ["a", "b"], "^sample 1 has reward inf"),
        ([1.0, 2.0], [0], r"rewards \(2,\), prompt_index \(1,\)"),
        ([[1.0], [2.0]], [[0], [0]], "expected one dimension"),
    ],
)
def test_what_is_refused(rewards: Any, groups: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        rl.group_advantages(rewards, groups)
