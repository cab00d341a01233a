"""Scores on the TPU's attention kernel, interpreted: prompts in pieces, beside outputs."""

from pathlib import Path

import pytest

from tests.integrations.conftest import GREEDY, OpenFlash, ids
from tests.support.liveness import SECONDS, at_rest, callers, until
from tests.support.pools import compilations, same
from tests.support.reference import make_random_model
from tests.support.scores import assert_scores

# With pages of 16 tokens and pieces of 64: inside a page, at edges, in two and in three pieces.
LENGTHS = [(1, 1), (15, 2), (16, 16), (60, 6), (3, 127)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(
        tmp_path_factory.mktemp("model"), "qwen3", 1, num_layers=1, num_heads=4, std=0.1
    )


def test_scores(open_flash: OpenFlash, model: Path) -> None:
    prompts, continuations = ([ids(pair[i], seed=i) for pair in LENGTHS] for i in (0, 1))
    with open_flash(model) as pool:
        with compilations() as seen:
            results = pool.score(input_ids=prompts, continuation_ids=continuations)
        assert seen == []
        assert_scores(model, prompts, continuations, results)
        until(lambda: at_rest(pool))


def test_beside_outputs(open_flash: OpenFlash, model: Path) -> None:
    """Neither writes into the other's KV cache."""
    prompts, continuations = [ids(100), ids(40)], [ids(40, 1), ids(5, 1)]
    asked = {"input_ids": [ids(20), ids(66)], "return_logprob": True}
    params = GREEDY | {"max_new_tokens": 8}
    with open_flash(model) as pool, callers(1) as executor:
        expected = pool.generate_all(None, params, **asked)
        answer = executor.submit(pool.generate_all, None, params, **asked)
        results = pool.score(input_ids=prompts, continuation_ids=continuations)
        same(answer.result(SECONDS), expected)
        assert_scores(model, prompts, continuations, results)
