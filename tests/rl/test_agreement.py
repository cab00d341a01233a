"""Agreement of trainer and rollout: the figures are compared with loops, and a real pool shows a
drift."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginepool import EnginePool, InvalidRequest, rl, toy
from tests.rl.test_batch import result
from tests.support.forced import logprobs, output_logits
from tests.support.pools import MakePool

PROMPTS = [list(text.encode()) for text in ("12+7=", "30+4=", "5+88=", "41+41=")]


def trainers(
    batch: rl.RolloutBatch, results: list[Any], name: str = "add", temperature: float = 1.0
) -> np.ndarray:
    """The log-probability of each output token by a plain JAX forward pass with a toy's weights.
    NaN in the padding."""
    outputs = [one["output_ids"] for one in results]
    prompts = [PROMPTS[one["meta_info"]["prompt_index"]] for one in results]
    made = np.full(batch.logprobs.shape, np.nan)
    for row, logits in enumerate(output_logits(toy.checkpoint(name), prompts, outputs)):
        values = logprobs(logits, temperature)
        made[row, : len(outputs[row])] = values[np.arange(len(outputs[row])), outputs[row]]
    return made


@st.composite
def batches(draw: st.DrawFn) -> tuple[rl.RolloutBatch, np.ndarray]:
    """Outputs of two versions, and a trainer's log-probabilities for them."""
    results = []
    for index in range(draw(st.integers(1, 4))):
        output = draw(st.lists(st.integers(0, 90), min_size=1, max_size=6))
        edge = draw(st.integers(0, len(output)))
        spans = [[a, b, v] for a, b, v in ((0, edge, 2), (edge, len(output), "new")) if b > a]
        results.append(result(0, [1], output, sample_index=index, spans=spans))
    batch = rl.pad_results(results, [[1]], pad_id=0, max_output=7)
    shape = batch.logprobs.shape
    cells = st.floats(-20, 0).map(lambda x: round(x, 2))
    values = draw(st.lists(cells, min_size=batch.logprobs.size, max_size=batch.logprobs.size))
    return batch, np.array(values).reshape(shape)


def check(got: rl.Agreement, cells: list[tuple[int, int, float, float]]) -> None:
    """Compares with loops over (row, position, trainer, rollout)."""
    ratios = [math.exp(t - r) for *_, t, r in cells]
    assert got.tokens == len(cells)
    assert got.mean == pytest.approx(sum(ratios) / len(ratios))
    assert [got.min, got.max] == pytest.approx([min(ratios), max(ratios)])
    assert got.kl_k1 == pytest.approx(sum(r - t for *_, t, r in cells) / len(cells), abs=1e-9)
    k3 = sum(math.exp(t - r) - 1 - (t - r) for *_, t, r in cells) / len(cells)
    assert got.kl_k3 == pytest.approx(k3, abs=1e-9)
    assert got.kl_k3 >= 0
    worst = max(abs(t - r) for *_, t, r in cells)
    assert abs(got.worst.trainer_logprob - got.worst.rollout_logprob) == pytest.approx(worst)


@settings(deadline=None)
@given(made=batches())
def test_figures(made: tuple[rl.RolloutBatch, np.ndarray]) -> None:
    """Over all tokens and over each version's, without padding."""
    batch, trainer = made
    got = rl.agreement(batch, trainer)
    cells: dict[Any, list[Any]] = {}
    for row, position in np.ndindex(batch.logprobs.shape):
        if batch.output_mask[row, position]:
            version = batch.weight_versions[row, position]
            cell = (row, position, trainer[row, position], float(batch.logprobs[row, position]))
            cells.setdefault(version, []).append(cell)
    check(got, [cell for group in cells.values() for cell in group])
    row, position = got.worst.row, got.worst.position
    assert got.worst.trainer_logprob == trainer[row, position]
    assert got.worst.token_id == batch.output_ids[row, position]
    assert got.worst.weight_version == batch.weight_versions[row, position]
    assert got.worst.sample_index == batch.sample_index[row]
    assert got.by_version.keys() == (cells.keys() if len(cells) > 1 else set())
    for version, part in got.by_version.items():
        check(part, cells[version])
        assert part.worst.weight_version == version


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_a_value_that_is_not_finite_is_the_worst(value: float) -> None:
    """It is part of the figures, so that they do not look like agreement."""
    batch = rl.pad_results([result(0, [1], [4, 80, 6])], [[1]], pad_id=0, max_output=4)
    trainer = batch.logprobs.astype(np.float64)
    trainer[0, 0] -= 9
    trainer[0, 2] = value
    got = rl.agreement(batch, trainer)
    assert (got.worst.position, got.worst.token_id) == (2, 6)
    assert not math.isfinite(got.kl_k3)


def test_a_version_may_be_labelled_as_the_padding_is() -> None:
    """The mask decides what is padding, not the label."""
    one = result(0, [1], [4, 5], spans=[[0, 1, -1], [1, 2, 0]])
    batch = rl.pad_results([one], [[1]], pad_id=0, max_output=4)
    got = rl.agreement(batch, np.zeros((1, 4)))
    assert [(version, part.tokens) for version, part in got.by_version.items()] == [(-1, 1), (0, 1)]


def test_what_is_refused() -> None:
    """Another shape, and a batch with nothing to compare."""
    batch = rl.pad_results([result(0, [1], [4])], [[1]], pad_id=0, max_output=4)
    with pytest.raises(InvalidRequest, match=r"shape \(1, 3\), the batch's are \(1, 4\)"):
        rl.agreement(batch, np.zeros((1, 3)))
    aborted = rl.pad_results([result(0, [1], [4], finish="abort")], [[1]], pad_id=0, max_output=4)
    with pytest.raises(InvalidRequest, match="1 of 1 results were aborted"):
        rl.agreement(aborted, np.zeros((1, 4)))


@pytest.fixture
def adder(make_pool: MakePool) -> Iterator[EnginePool]:
    """Two engines on the toy that adds. They get its weights back afterwards."""
    pool = make_pool("toy", 2)
    yield pool
    pool.update_weights(toy.checkpoint("add"), weight_version=0)


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_on_policy(adder: EnginePool, temperature: float) -> None:
    """A trainer with the engines' weights has a ratio of 1 everywhere. One that ignores the
    temperature has not."""
    params = {"n": 4, "temperature": temperature, "max_new_tokens": 24, "ignore_eos": True}
    results = adder.generate_all(
        None, params | {"sampling_seed": 3}, input_ids=PROMPTS, return_logprob=True
    )
    batch = rl.pad_results(results, PROMPTS, pad_id=0, max_prompt=8, max_output=24)
    got = rl.agreement(batch, trainers(batch, results, temperature=temperature))
    assert got.tokens == 4 * 4 * 24
    assert got.mean == pytest.approx(1, abs=1e-3)
    assert [got.min, got.max] == pytest.approx([1, 1], abs=1e-3)
    assert abs(got.kl_k1) < 1e-3
    assert 0 <= got.kl_k3 < 1e-6
    if temperature != 1:
        assert rl.agreement(batch, trainers(batch, results)).kl_k3 > 1e-2


def test_a_drift_is_seen_and_named(adder: EnginePool) -> None:
    """Weights change within outputs. A trainer with the old weights agrees on their tokens, and
    the worst token is of the new ones."""
    params = {"n": 4, "temperature": 1.0, "max_new_tokens": 200, "ignore_eos": True}
    last: dict[int, Any] = {}
    for chunk in adder.stream(
        None, params | {"sampling_seed": 5}, input_ids=PROMPTS[0], return_logprob=True
    ):
        if not last:
            adder.pause_generation("retract")
            adder.update_weights(toy.checkpoint("subtract"), mode="retract", weight_version="sub")
            adder.continue_generation()
        last[chunk["index"]] = chunk
    results = [last[index] for index in sorted(last)]
    batch = rl.pad_results(results, PROMPTS, pad_id=0)
    assert batch.output_ids.shape == (4, 256)
    got = rl.agreement(batch, trainers(batch, results))
    old, new = got.by_version[0], got.by_version["sub"]
    assert old.tokens + new.tokens == got.tokens == 800
    assert [old.min, old.max] == pytest.approx([1, 1], abs=1e-3)
    assert new.kl_k3 > 0.1
    assert new.worst == got.worst
    assert got.worst.weight_version == "sub"
    assert "version sub" in str(got)
    theirs = rl.agreement(batch, trainers(batch, results, "subtract"))
    assert theirs.by_version["sub"].max == pytest.approx(1, abs=1e-3)
    assert theirs.worst.weight_version == 0
