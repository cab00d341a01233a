"""Unusual numbers and dtypes in int8, and their figures in the report of an update."""

import math
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from enginepool import EnginePool, InvalidWeights
from enginepool.runtime.swap_report import QuantizedMatrix
from enginepool.weights.fingerprint import part_sums
from enginepool.weights.tied import HEAD
from tests.runtime.test_swap_faults import states
from tests.support.layouts import placed, tensors
from tests.support.liveness import until
from tests.support.marks import slow
from tests.support.pools import MakePool
from tests.support.quantized import (
    check_report,
    expected_leaves,
    has,
    held,
    holds,
    is_matrix,
    quantize,
    serves_quantized,
)
from tests.weights.test_quantized import (
    WEIGHTS,
    Model,
    Params,
    from_a_device,
    from_a_state,
    from_shards_in_layout,
)

ODD = "model.layers.0.mlp.gate_proj.weight"
ZERO = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def int8(make_pool: MakePool) -> EnginePool:
    return make_pool("qwen3", 2, warmup="none", dtype="float32", **WEIGHTS)


def from_two_shards(params: Params) -> Any:
    """Sharded over the engines' devices."""
    return placed(params, PartitionSpec(None, "fsdp"), devices=2)


def test_source_fingerprint(int8: EnginePool, four: EnginePool, target: Model) -> None:
    """It is that of a pool that does not quantize. That pool's report has no such field."""
    plain = four.update_weights(target("qwen3"))
    assert (plain.source, plain.quantized) == (None, {})
    report = int8.update_weights(target("qwen3"))
    assert report.source == plain.staged == four.checksum()
    assert report.to_dict()["quantized"].keys() == report.quantized.keys()


@pytest.mark.parametrize("source", [from_a_device, from_a_state, from_two_shards])
def test_odd_matrices(int8: EnginePool, target: Model, source: Any) -> None:
    """An output of zeros, an outlier, very small numbers, outputs whose scale is subnormal, and a
    matrix of zeros. Then an outlier whose square is no float32."""
    params = {name: value.copy() for name, value in tensors(target("qwen3")).items()}
    params[ODD][1], params[ODD][2, 3], params[ODD][4] = 0, -1e4, params[ODD][4] * 1e-30
    params[ODD][6], params[ODD][7] = params[ODD][6] * 1e-36, params[ODD][7] * 1e-40
    params[ZERO][:] = 0
    report = int8.update_weights(source(params))
    holds(int8, params)
    check_report(report, int8, params)
    assert report.quantized[ZERO] == QuantizedMatrix(0, 0)
    params[ODD][2, 3] = 1e30
    report = int8.update_weights(source(params))
    holds(int8, params)
    assert report.quantized[ODD].relative_error < 1e-6


@pytest.mark.parametrize(
    ("number", "source"), [(np.nan, dict), (np.inf, from_a_device), (-np.inf, from_two_shards)]
)
def test_not_finite(int8: EnginePool, target: Model, number: float, source: Any) -> None:
    """One output of a matrix is lost, and the report names the matrix. Requests end as with
    weights that are not quantized, and the next weights serve."""
    params = {name: value.copy() for name, value in tensors(target("qwen3")).items()}
    whole = int8.update_weights(source(params))
    params[ODD][5, 7] = number
    report = int8.update_weights(source(params))
    assert math.isnan(report.quantized[ODD].relative_error)
    assert math.isnan(report.quantized[ODD].largest_error)
    assert {**report.quantized, ODD: None} == {**whole.quantized, ODD: None}
    found, expected = held(int8, 0), expected_leaves(params)
    assert np.flatnonzero(np.isnan(found[f"{ODD}_scale"])).tolist() == [5]
    for path in (f"{ODD}_q", f"{ODD}_scale"):
        others, wanted = (np.delete(each[path], 5, axis=0) for each in (found, expected))
        np.testing.assert_array_equal(others, wanted)
    (result,) = int8.generate_all(input_ids=[[5, 6]], sampling_params={"max_new_tokens": 2})
    assert result["meta_info"]["finish_reason"]["err_type"] == "not_finite"
    until(lambda: states(int8) == ["serving"] * 2)
    int8.update_weights(target("qwen3"))
    serves_quantized(int8, target("qwen3"))


def test_trainer_that_deletes(int8: EnginePool, model_dir: Model, target: Model) -> None:
    """Of the trainer's arrays an engine may share those that are not quantized, and none with
    `copy`. So the trainer can donate its matrices."""
    given = from_a_device(tensors(target("qwen3")))
    report = int8.update_weights(given)
    assert report.engines[0].shared == sum(not is_matrix(name) for name in given)
    delete(given, is_matrix)
    has(int8, target("qwen3"))
    serves_quantized(int8, target("qwen3"))
    given = from_a_device(tensors(model_dir("qwen3")))
    staged = int8.stage_weights(given)
    delete(given, is_matrix)
    staged.commit()
    has(int8, model_dir("qwen3"))
    serves_quantized(int8, model_dir("qwen3"))
    given = from_a_device(tensors(target("qwen3")))
    report = int8.update_weights(given, copy=True)
    assert report.engines[0].shared == 0
    delete(given, lambda _: True)
    has(int8, target("qwen3"))
    serves_quantized(int8, target("qwen3"))


def delete(arrays: dict[str, Any], which: Callable[[str], bool]) -> None:
    """Delete these arrays, as a program does to which they are donated."""
    for name, array in arrays.items():
        if which(name):
            array.delete()


def test_tied_head(int8: EnginePool, target: Model) -> None:
    """A source may have it beside the embedding. It is compared, and not quantized."""
    params = tensors(target("qwen3"))
    head = params["model.embed_tokens.weight"]
    int8.update_weights(params | {HEAD: head}, staging="stream")
    has(int8, target("qwen3"))
    before = int8.checksum()
    with pytest.raises(InvalidWeights, match=f"{HEAD}: differs from the embedding"):
        int8.update_weights(params | {HEAD: head + 1})
    assert int8.checksum() == before


@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        (dict, np.float16),
        (from_a_device, np.float32),
        (from_a_state, np.float16),
        (from_a_state, ml_dtypes.bfloat16),
        (from_two_shards, np.float32),
        (from_shards_in_layout, ml_dtypes.bfloat16),
    ],
)
@pytest.mark.parametrize("own", ["bfloat16", *slow("float32")])
def test_dtypes(make_pool: MakePool, target: Model, source: Any, dtype: Any, own: str) -> None:
    """A source is rounded to the model's dtype, and then quantized in float32."""
    pool = make_pool("qwen3", 2, warmup="none", dtype=own, **WEIGHTS)
    params = {name: value.astype(dtype) for name, value in tensors(target("qwen3")).items()}
    report = pool.update_weights(source(params))
    params = {name: value.astype(jax.numpy.dtype(own)) for name, value in params.items()}
    holds(pool, params)
    check_report(report, pool, params)


@pytest.mark.parametrize("shape", [(48, 32), (3, 48, 32), (3, 5)])
def test_sums_of_a_fingerprint(shape: tuple[int, ...]) -> None:
    """They are NumPy's, also for a transposed array."""
    array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    words = array.view(np.uint32).reshape(-1, shape[-1]).astype(np.uint64)
    row, column = np.indices(words.shape, np.uint64)
    factor = (row * 0x85EBCA77 + column * 0x9E3779B1) % 2**32 | 1
    expected = [int((words * factor % 2**32).sum()) % 2**32]
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert part_sums(jax.numpy.asarray(array), there).tolist() == expected
    turned = jax.numpy.asarray(array.swapaxes(-1, -2))
    assert part_sums(turned, there, turned=True).tolist() == expected


def test_refused(int8: EnginePool, target: Model) -> None:
    """A source must have the names and dtypes of weights that are not quantized. Nothing
    changes."""
    before, params = int8.checksum(), tensors(target("qwen3"))
    with pytest.raises(InvalidWeights, match=r"unknown|none of the names"):
        int8.update_weights(held(int8, 0))
    quantized = {ODD: quantize(params[ODD])[0], f"{ODD}_scale": quantize(params[ODD])[1]}
    with pytest.raises(InvalidWeights, match=f"unknown 1 name: {ODD}_scale"):
        int8.update_weights(params | quantized)
    with pytest.raises(InvalidWeights, match=f"{ODD}: dtype int8 cannot become the model's"):
        int8.update_weights(quantized, strict=False)
    assert int8.checksum() == before
