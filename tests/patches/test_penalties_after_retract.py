"""Penalties of a request that enters with outputs, on a real scheduler."""

import pytest

import patches
from patches import penalties_after_retract

PROMPTS = [[2, 3, 4], [5, 6], [7, 8, 9]]
LENGTH, RESUMED_AT = 12, 5
PENALTIES = {
    "frequency_penalty": {"frequency_penalty": 1.0},
    "presence_penalty": {"presence_penalty": 1.5},
    # All but one id end the request, so that the ban determines every token.
    "min_new_tokens": {"min_new_tokens": 7, "stop_token_ids": list(range(2, 63))},
}


def run(upstream, penalty, outputs=None):
    params = {"temperature": 0.0, "max_new_tokens": LENGTH, **PENALTIES[penalty]}
    return upstream.run(PROMPTS, params, outputs)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_upstream_forgets_the_outputs(upstream, penalty):
    """Without the patch, a resumed request gets other ids."""
    whole = run(upstream, penalty)
    assert run(upstream, penalty, [ids[:RESUMED_AT] for ids in whole]) != whole


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_resumed_request_continues(upstream, penalty):
    """With the patch, it gets the ids of the uninterrupted request."""
    patches.apply([penalties_after_retract.PATCH])
    whole = run(upstream, penalty)
    assert run(upstream, penalty, [ids[:RESUMED_AT] for ids in whole]) == whole
    # Requests with and without outputs in one batch, in the same order as above.
    assert run(upstream, penalty, [whole[0][:RESUMED_AT], [], whole[2][:1]]) == whole


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_request_without_outputs_is_unchanged(upstream, penalty):
    """The patch changes nothing for a request that starts from its prompt."""
    before = run(upstream, penalty)
    patches.apply([penalties_after_retract.PATCH])
    assert run(upstream, penalty) == before
