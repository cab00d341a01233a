"""A request's sampling_seed, on a real scheduler."""

import numpy as np
import pytest

import patches
from patches import request_seed

PROMPTS = [[2, 3, 4], [5, 6], [7], [8, 9, 10, 11], [12, 13], [14]]
LENGTHS = [4, 9, 6, 12, 5, 7]


def params(seed, max_new_tokens=12):
    return {"temperature": 1.0, "sampling_seed": seed, "max_new_tokens": max_new_tokens}


def test_upstream_ignores_the_seed(upstream):
    """Without the patch, the same prompt with the same seed gives other ids."""
    first, second = (upstream.run([[2, 3, 4]], params(7)) for _ in range(2))
    assert first != second


def test_the_same_seed_gives_the_same_ids(upstream):
    """With the patch, the ids depend on the seed."""
    patches.apply([request_seed.PATCH])
    first, second, other = (upstream.run([[2, 3, 4]], params(seed)) for seed in (7, 7, 8))
    assert first == second != other


def test_the_seed_survives_merge_filter_and_padding(upstream):
    """Six requests in four rows end at different steps. Each gives what it gives alone."""
    patches.apply([request_seed.PATCH])
    each = [params(index - 3, length) for index, length in enumerate(LENGTHS)]
    together = upstream.run(PROMPTS, each)
    alone = [upstream.run([prompt], one)[0] for prompt, one in zip(PROMPTS, each, strict=True)]
    assert together == alone
    assert [len(ids) for ids in together] == LENGTHS


def test_a_request_without_a_seed_among_others_finishes(upstream):
    """Seeded and unseeded requests can be merged. The batch is then sampled by upstream's own
    code."""
    patches.apply([request_seed.PATCH])
    each = [params(None if index == 4 else index, length) for index, length in enumerate(LENGTHS)]
    assert [len(ids) for ids in upstream.run(PROMPTS, each)] == LENGTHS


@pytest.mark.parametrize("seed", [-1, -(2**31), 2**31 - 1, 2**31, 2**63, np.int64(5)])
def test_any_integer_is_a_seed(upstream, seed):
    """Seeds outside int32 are taken modulo 2**32. They must not end the engine's loop."""
    patches.apply([request_seed.PATCH])
    wrapped = (int(seed) + 2**31) % 2**32 - 2**31
    assert upstream.run([[2, 3]], params(seed, 4)) == upstream.run([[2, 3]], params(wrapped, 4))
