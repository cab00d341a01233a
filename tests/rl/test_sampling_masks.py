"""Masks as arrays, and a trainer's log-probabilities under them, compared with NumPy."""

from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginepool import InvalidRequest, rl
from tests.rl.test_batch import PAD, result

VOCABULARY = 11


def masked(rows: list[list[int]], **others: Any) -> dict[str, Any]:
    """A result whose tokens are the first of their ids. No ids means all."""
    made = result(0, [1, 2], [row[0] if row else 3 for row in rows], **others)
    made["meta_info"] |= {
        "output_sampling_mask": {
            "indptr": np.cumsum([0, *map(len, rows)]).tolist(),
            "ids": [*chain.from_iterable(rows)],
            "too_many": [],
        },
        "output_token_sampling_logprobs": [-0.5 - place for place in range(len(rows))],
    }
    return made


RESULTS = [
    masked([[2, 4, 7], [], [5]]),
    masked([[0, 1, 2, 8, 9], [10]], sample_index=1),
    masked([[0, 1]], sample_index=2, finish="abort"),
]


def test_pad_results() -> None:
    batch = rl.pad_results(RESULTS, [[1, 2]], pad_id=PAD, max_output=4)
    assert batch.sampling_mask is not None
    assert batch.sampling_logprobs is not None
    assert batch.sampling_mask.shape == (3, 4, 8)
    listed = [[row[row >= 0].tolist() for row in one] for one in batch.sampling_mask]
    assert listed == [[[2, 4, 7], [], [5], []], [[0, 1, 2, 8, 9], [10], [], []], [[]] * 4]
    assert (np.sort(-batch.sampling_mask[batch.sampling_mask < 0]) == 1).all()
    assert batch.sampling_logprobs.tolist() == [[-0.5, -1.5, -2.5, 0], [-0.5, -1.5, 0, 0], [0] * 4]
    wider = rl.pad_results(RESULTS, [[1, 2]], pad_id=PAD, max_sampling_mask=20)
    assert wider.sampling_mask is not None
    assert wider.sampling_mask.shape[2] == 20


def test_without_masks() -> None:
    """The batch has none, and a jitted function accepts it all the same."""
    batch = rl.pad_results([result(0, [1, 2], [3])], [[1, 2]], pad_id=PAD)
    assert batch.sampling_mask is None
    assert batch.sampling_logprobs is None
    assert int(jax.jit(lambda one: one.output_mask.sum())(batch)) == 1


def test_refused() -> None:
    def refused(results: list[dict[str, Any]], *words: str, **options: Any) -> None:
        with pytest.raises(InvalidRequest) as error:
            rl.pad_results(results, [[1, 2]], pad_id=PAD, **options)
        assert all(word in str(error.value) for word in words), error.value

    refused([*RESULTS, result(0, [1, 2], [3])], "result 3", "result 0", "return_sampling_mask")
    refused(RESULTS, "5 ids", "max_sampling_mask=4", "top_k", max_sampling_mask=4)
    large = masked([[1], []])
    large["meta_info"]["output_sampling_mask"]["too_many"] = [[1, 800]]
    refused([large], "position 1", "800 ids", "top_k")


@pytest.mark.parametrize("temperature", [1.0, 0.7, np.array([[0.5, 2.0, 1.0, 1.0]] * 3)])
def test_renormalised(temperature: Any) -> None:
    batch = rl.pad_results(RESULTS, [[1, 2]], pad_id=PAD, max_output=4)
    logits = np.random.default_rng(0).normal(size=(3, 4, VOCABULARY)) * 3
    got = np.asarray(
        jax.jit(rl.sampling_logprobs)(
            jnp.asarray(logits, jnp.float32), batch.output_ids, batch.sampling_mask, temperature
        )
    )
    scale = np.broadcast_to(temperature, (3, 4))
    for row, one in enumerate(RESULTS[:2]):
        bounds = one["meta_info"]["output_sampling_mask"]["indptr"]
        ids = one["meta_info"]["output_sampling_mask"]["ids"]
        for place, token in enumerate(one["output_ids"]):
            law = logits[row, place] / scale[row, place]
            among = ids[bounds[place] : bounds[place + 1]] or list(range(VOCABULARY))
            expected = law[token] - np.log(np.exp(law[among]).sum())
            assert got[row, place] == pytest.approx(expected, abs=1e-5)


def test_gradient() -> None:
    """It is finite, also in the padding, and zero for ids that could not be sampled."""
    batch = rl.pad_results(RESULTS, [[1, 2]], pad_id=PAD, max_output=4)
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(3, 4, VOCABULARY)))

    def loss(logits: jax.Array) -> jax.Array:
        values = rl.sampling_logprobs(logits, batch.output_ids, jnp.asarray(batch.sampling_mask))
        return (values * batch.output_mask).sum()

    slope = np.asarray(jax.grad(loss)(logits))
    assert np.isfinite(slope).all()
    assert np.flatnonzero(slope[0, 0]).tolist() == [2, 4, 7]
    assert np.flatnonzero(slope[0, 1]).tolist() == list(range(VOCABULARY))
