"""A request resumes with outputs, in a KV cache that is just large enough."""

import pytest

import patches
from patches import resumed_reservation
from tests.support.upstream import Upstream

PROMPT = list(range(2, 12))
OUTPUTS = [3] * 90
GREEDY = {"temperature": 0.0, "max_new_tokens": 100}


@pytest.fixture(scope="module")
def small(checkpoint):
    """Room for the prompt and all of its outputs (110 tokens), but not for 90 of them twice."""
    return Upstream(checkpoint, max_total_tokens=150)


def test_upstream_never_admits_it(small):
    """Without the patch, it waits for ever."""
    [output_ids] = small.run([PROMPT], GREEDY, [OUTPUTS], iterations=30)
    assert output_ids == OUTPUTS


def test_it_is_admitted(small):
    """With the patch, it continues where it was and ends at its limit, as upstream does with
    enough room."""
    patches.apply([resumed_reservation.PATCH])
    [output_ids] = small.run([PROMPT], GREEDY, [OUTPUTS], iterations=30)
    assert output_ids[:90] == OUTPUTS
    assert len(output_ids) == 100


def test_the_limit_is_as_before(small):
    """The request's own parameters stay. Without outputs nothing changes."""
    [expected] = small.run([PROMPT], GREEDY)
    patches.apply([resumed_reservation.PATCH])
    assert small.run([PROMPT], GREEDY) == [expected]
    assert len(expected) == 100
