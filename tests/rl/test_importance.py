"""Truncated importance sampling is compared with loops, and with the expectation that it
corrects."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginepool import InvalidRequest, rl
from tests.rl.test_agreement import batches
from tests.rl.test_batch import result


@settings(deadline=None, max_examples=50)
@given(batches(), st.floats(1, 5))
def test_weights(made: tuple[rl.RolloutBatch, np.ndarray], cap: float) -> None:
    batch, trainer = made
    weights = rl.importance_weights(batch, trainer, cap)
    assert weights.dtype == np.float32
    for row, position in np.ndindex(batch.logprobs.shape):
        ratio = math.exp(trainer[row, position] - float(batch.logprobs[row, position]))
        expected = min(ratio, cap) if batch.output_mask[row, position] else 0
        assert weights[row, position] == pytest.approx(expected, rel=1e-5)


def test_the_expectation_that_weights_correct() -> None:
    """If no weight is truncated, the mean of weight × gain under the rollout's law is the mean
    of the gain under the trainer's."""
    rollout, trainer = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.35, 0.25])
    gain = np.array([1.0, -2.0, 5.0])
    batch = rl.pad_results([result(0, [1], [4, 80, 6])], [[1]], pad_id=0, max_output=4)
    batch.logprobs[0, :3] = np.log(rollout)
    weights = rl.importance_weights(batch, np.log([[*trainer, 0.1]]))[0, :3]
    assert (rollout * weights * gain).sum() == pytest.approx((trainer * gain).sum(), rel=1e-5)


def test_refused() -> None:
    batch = rl.pad_results([result(0, [1], [4])], [[1]], pad_id=0, max_output=4)
    with pytest.raises(InvalidRequest, match=r"shape \(1, 3\)"):
        rl.importance_weights(batch, np.zeros((1, 3)))
    with pytest.raises(InvalidRequest, match=r"cap=0\.5: expected 1 or more"):
        rl.importance_weights(batch, np.zeros((1, 4)), cap=0.5)
