"""The TPU's attention kernel with a KV cache that is too small for the running requests."""

from pathlib import Path

import pytest

from tests.integrations.conftest import GREEDY, OpenFlash, ids
from tests.support.forced import assert_greedy
from tests.support.liveness import at_rest, until
from tests.support.reference import make_random_model
from tests.support.steady import steps

# Ten pages. The four requests need sixteen in the end.
TOO_LITTLE = {"max_total_tokens": 160, "schedule_conservativeness": 0.3}


@pytest.mark.slow
def test_kv_cache_runs_out_in_the_middle(
    open_flash: OpenFlash, tmp_path: Path, retracted: list[int]
) -> None:
    """Steady decode stops, upstream retracts a request, and every answer is right."""
    model = make_random_model(tmp_path, "qwen3", 1, num_layers=1, num_heads=4)
    prompts = [ids(n) for n in (20, 3, 30, 14)]
    # For an output that ignores the end token, upstream reserves its whole length.
    params = GREEDY | {"max_new_tokens": 40, "ignore_eos": False}
    with open_flash(model, **TOO_LITTLE) as pool:
        results = pool.generate_all(None, params, input_ids=prompts, return_logprob=True)
        steady, fallback = steps(pool)
        until(lambda: at_rest(pool))
        assert pool.events() == []
    assert steady > fallback
    assert retracted
    assert assert_greedy(model, prompts, results) > 120
