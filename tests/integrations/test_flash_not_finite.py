"""Numbers that are not finite, on the TPU's attention kernel, which keeps rows apart."""

from pathlib import Path

import pytest

from tests.integrations.conftest import GREEDY, OpenFlash, ids
from tests.support.forced import assert_greedy
from tests.support.liveness import at_rest, until
from tests.support.not_finite import BAD_TOKENS, SPOKEN, not_finite, write_spoiled

BAD = {*BAD_TOKENS, SPOKEN}


@pytest.mark.slow
def test_one_bad_row_among_good_ones(open_flash: OpenFlash, tmp_path: Path) -> None:
    """The numbers of the other requests in the batch are right. So the bad request is tried
    again alone, and ends."""
    model = write_spoiled(tmp_path, num_layers=1, num_heads=4)
    prompts = [[token for token in ids(n) if token not in BAD] for n in (20, 3, 30, 14)]
    with open_flash(model) as pool:
        bad = [70, 71, BAD_TOKENS[0], 72]
        params = GREEDY | {"max_new_tokens": 6}
        results = pool.generate_all(
            None, params, input_ids=[*prompts[:2], bad, *prompts[2:]], return_logprob=True
        )
        assert not_finite(results.pop(2))
        reasons = [e["reason"] for e in pool.events() if e["event"] == "engine_quarantined"]
        until(lambda: at_rest(pool))
    assert all("1 in a step" in reason or "alone in its step" in reason for reason in reasons)
    assert "1 in a step" in reasons[0]
    assert assert_greedy(model, prompts, results) == 24
