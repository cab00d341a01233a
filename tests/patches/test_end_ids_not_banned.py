"""min_new_tokens with the model's own end ids, on a real scheduler."""

import pytest

import patches
from patches import end_ids_not_banned

ENDS = set(range(2, 60))
PARAMS = {"temperature": 0.0, "max_new_tokens": 8, "min_new_tokens": 5}


@pytest.fixture
def run(upstream, monkeypatch):
    monkeypatch.setattr(upstream.scheduler.model_config, "hf_eos_token_id", ENDS)
    return lambda: upstream.run([[2, 3, 4], [5, 6]], PARAMS)


def test_upstream_samples_them(run):
    assert all(ENDS & set(ids[:5]) for ids in run())


def test_end_ids_are_banned(run):
    """While the request has too few tokens, and no longer."""
    patches.apply([end_ids_not_banned.PATCH])
    outputs = run()
    assert not any(ENDS & set(ids[:5]) for ids in outputs)
    assert all(ENDS & set(ids[5:]) for ids in outputs)
