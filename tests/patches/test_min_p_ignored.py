"""min_p of a request, on a real scheduler."""

import patches
from patches import min_p, min_p_ignored

PROMPTS = [[2, 3, 4], [5, 6]]
# Only the most probable token is left, as in greedy decoding.
ONLY_THE_BEST = {"temperature": 1.0, "min_p": 1.0, "max_new_tokens": 12}
GREEDY = {"temperature": 0.0, "max_new_tokens": 12}


def test_upstream_ignores_min_p(upstream):
    """Without the patch, min_p 1.0 changes nothing."""
    assert upstream.run(PROMPTS, ONLY_THE_BEST) != upstream.run(PROMPTS, GREEDY)


def test_min_p_reaches_the_sampler(upstream):
    """With the patch, min_p 1.0 is greedy decoding."""
    patches.apply([min_p.PATCH, min_p_ignored.PATCH])
    assert upstream.run(PROMPTS, ONLY_THE_BEST) == upstream.run(PROMPTS, GREEDY)


def test_a_request_without_min_p_is_unchanged(upstream):
    """A request beside one with min_p keeps its whole distribution."""
    patches.apply([min_p.PATCH, min_p_ignored.PATCH])
    free = {"temperature": 1.0, "max_new_tokens": 12}
    best, sampled = upstream.run([[2, 3, 4]] * 2, [ONLY_THE_BEST, free])
    assert best == upstream.run([[2, 3, 4]], GREEDY)[0] != sampled
