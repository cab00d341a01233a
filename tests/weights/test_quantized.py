"""A checkpoint, and a trainer's own arrays, served in int8."""

import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from enginepool import EnginePool, InvalidConfig, NoWeights, WeightUpdateFailed
from enginepool.weights import batches
from enginepool.weights.plan import Plan
from enginepool.weights.shard_quantizing import quantize_program
from tests.runtime.test_swap_faults import (
    FOR_EVER,
    FULL,
    LEAF,
    broken_commit,
    full,
    in_halves,
    refused,
    states,
    versions,
)
from tests.support.families import QWEN3_MOE
from tests.support.faults import Fault, every_step, scheduler_of
from tests.support.layouts import answers, leaves, own_layout, placed, tensors
from tests.support.liveness import SECONDS, callers, running, until
from tests.support.pools import SMALL, MakePool, same
from tests.support.quantized import (
    check_errors,
    check_report,
    expected_leaves,
    has,
    held,
    serves_quantized,
)
from tests.support.reference import make_random_model
from tests.weights.test_memory import device_bytes, devices_of, peaks
from tests.weights.test_sources import int_or_str, nested

WEIGHTS: dict[str, Any] = {"quantization_config_path": "int8.yaml"}
BOTH: dict[str, Any] = {"quantization_config_path": "int8_w8a8.yaml"}
LONG = 100  # tokens of an output that still runs when an update comes
Model = Callable[[str], Path]
Params = dict[str, np.ndarray]


@pytest.fixture
def int8(make_pool: MakePool, model_dir: Model) -> Iterator[EnginePool]:
    """Four engines, which get their own weights back afterwards."""
    pool = make_pool("qwen3", 4, **WEIGHTS)
    yield pool
    pool.update_weights(model_dir("qwen3"), weight_version=0)


def test_opens(int8: EnginePool, model_dir: Model) -> None:
    has(int8, model_dir("qwen3"))
    serves_quantized(int8, model_dir("qwen3"))
    check_errors(int8.stats()["start"]["quantized"], tensors(model_dir("qwen3")))


def from_shards(params: Params) -> Any:
    return placed(params, PartitionSpec(None, "fsdp"))


def from_a_device(params: Params) -> Any:
    return {name: jax.numpy.asarray(value) for name, value in params.items()}


def from_a_state(params: Params) -> Any:
    return nnx.State(nested(own_layout(params), int_or_str))


def from_shards_in_layout(params: Params) -> Any:
    return placed(own_layout(params), PartitionSpec("fsdp"))


def from_an_iterator(params: Params) -> Any:
    return reversed(list(params.items()))


SOURCES = [dict, from_shards, from_a_device, from_a_state, from_shards_in_layout]


@pytest.mark.parametrize(
    ("source", "staging"),
    [(source, "double") for source in (*SOURCES, from_an_iterator)]
    + [(source, "stream") for source in (dict, from_shards, from_a_state, from_an_iterator)],
)
def test_sources(int8: EnginePool, target: Model, source: Any, staging: Any) -> None:
    given, known = source(tensors(target("qwen3"))), quantize_program.cache_info
    before = known().hits + known().misses
    report = int8.update_weights(given, staging=staging)
    assert report.staging == staging
    # Parts are quantized where they are if all engines read the source.
    early = source in (from_shards, from_shards_in_layout) and staging == "double"
    assert (known().hits + known().misses > before) == early
    assert not report.left
    assert {each.fingerprint for each in report.engines} == {report.staged}
    has(int8, target("qwen3"))
    check_report(report, int8, tensors(target("qwen3")))


def test_same_as_a_new_pool(make_pool: MakePool, target: Model) -> None:
    """Into bfloat16 from float32: rounded to bfloat16 first, as a checkpoint is."""
    options: dict[str, Any] = WEIGHTS | {"dtype": "bfloat16", "warmup": "none"}
    pool = make_pool("qwen3", 1, **options)
    report = pool.update_weights(from_a_device(tensors(target("qwen3"))))
    with EnginePool(str(target("qwen3")), devices=1, **SMALL | options) as fresh:
        assert fresh.checksum() == pool.checksum() == report.staged
        own = fresh.get_weights_by_name("model.layers.0.self_attn.q_proj.weight")
    near = tensors(target("qwen3"))["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_allclose(own, near[:100], atol=np.abs(near).max() / 127)


def test_engines_of_two_devices(tmp_path: Path) -> None:
    """They serve while new weights are quantized."""
    old, new = (
        make_random_model(tmp_path / str(seed), "qwen3", seed, num_heads=2) for seed in (1, 2)
    )
    params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": LONG}
    options: dict[str, Any] = SMALL | WEIGHTS | {"tp_size": 2, "warmup": "none"}
    with EnginePool(str(old), devices=2, **options) as pool, callers(1) as executor:
        has(pool, old)
        call = executor.submit(pool.generate_all, input_ids=[[5, 6]] * 8, sampling_params=params)
        until(lambda: running(pool) > 0)
        for source, model in ((dict, new), (from_shards, old), (from_a_state, new)):
            report = pool.update_weights(source(tensors(model)), mode="in_place")
            has(pool, model)
            check_report(report, pool, tensors(model))
        assert [len(result["output_ids"]) for result in call.result(SECONDS)] == [LONG] * 8
        serves_quantized(pool, new)


def test_partial(int8: EnginePool, model_dir: Model, target: Model) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    report = int8.update_weights({name: tensors(target("qwen3"))[name]}, strict=False)
    assert f"{name}_q" not in report.left
    assert report.quantized.keys() == {name}
    assert "model.layers.0.mlp.down_proj.weight_q" in report.left
    expected = expected_leaves(tensors(target("qwen3")))
    np.testing.assert_array_equal(held(int8, 3)[f"{name}_q"], expected[f"{name}_q"])


def test_staged(int8: EnginePool, target: Model) -> None:
    staged = int8.stage_weights(tensors(target("qwen3")))
    report = staged.commit()
    assert staged.nbytes == report.nbytes
    has(int8, target("qwen3"))
    check_report(report, int8, tensors(target("qwen3")))


ROLLING: list[Any] = [("drain", "double", "rolling"), ("abort", "stream", "rolling")]
# Each mode with one staging. The other pairs are slow.
SOME_WAYS: list[Any] = [
    *(("drain", "stream", "atomic"), ("retract", "double", "atomic")),
    *(("in_place", "stream", "atomic"), ("abort", "double", "atomic")),
    *ROLLING,
]
EVERY_WAY: list[Any] = [
    *itertools.product(
        ("drain", "retract", "in_place", "abort"), ("double", "stream"), ("atomic",)
    ),
    *ROLLING,
]


@pytest.mark.parametrize(
    ("engines", "options", "ways"),
    [
        pytest.param(4, WEIGHTS, SOME_WAYS, id="weights, 4"),
        pytest.param(1, BOTH, SOME_WAYS[2:4], id="activations too, 1"),
        pytest.param(4, WEIGHTS, EVERY_WAY, id="weights, 4, every", marks=pytest.mark.slow),
        pytest.param(1, WEIGHTS, EVERY_WAY, id="weights, 1, every", marks=pytest.mark.slow),
        pytest.param(1, BOTH, EVERY_WAY, id="activations too, 1, every", marks=pytest.mark.slow),
        pytest.param(4, BOTH, EVERY_WAY, id="activations too, 4, every", marks=pytest.mark.slow),
    ],
)
def test_every_mode_under_load(
    make_pool: MakePool,
    model_dir: Model,
    target: Model,
    engines: int,
    options: dict[str, Any],
    ways: list[Any],
) -> None:
    """Updates while engines generate. The weights are NumPy's from opening on, after each
    update, and after a fault and a rebuild. They serve at the beginning and at the end."""
    pool, activations = make_pool("qwen3", engines, **options), options is BOTH
    has(pool, model_dir("qwen3"))
    serves_quantized(pool, model_dir("qwen3"), activations=activations)
    params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": LONG}
    with callers(1) as executor:
        for number, (mode, staging, strategy) in enumerate(ways):
            call = executor.submit(
                pool.generate_all, input_ids=[[5, 6, number]] * 8, sampling_params=params
            )
            until(lambda: running(pool) > 0)
            model = (target if number % 2 == 0 else model_dir)("qwen3")
            pool.update_weights(tensors(model), mode=mode, staging=staging, strategy=strategy)
            has(pool, model)
            results = call.result(SECONDS)
            if mode != "abort":
                assert [len(result["output_ids"]) for result in results] == [LONG] * 8
    serves_quantized(pool, model_dir("qwen3"), activations=activations)
    pool.update_weights(tensors(target("qwen3")))
    rebuild(pool, engines - 1)
    has(pool, target("qwen3"))
    serves_quantized(pool, target("qwen3"), activations=activations)
    pool.update_weights(model_dir("qwen3"), weight_version=0)


def rebuild(pool: EnginePool, index: int) -> None:
    """Every step of an engine fails, until another engine object has taken its place."""
    engine = pool.engines[index]

    def always(*_: Any, **__: Any) -> Any:
        raise Fault("again")

    every_step(scheduler_of(pool, index), lambda _: always)
    while pool.engines[index] is engine:
        answers(pool)
    until(lambda: states(pool) == ["serving"] * len(pool.engines))


def test_failed_commit(int8: EnginePool, target: Model) -> None:
    expected, checksum = answers(int8), int8.checksum()
    with broken_commit(int8, 2, 7), pytest.raises(WeightUpdateFailed, match=FULL):
        int8.update_weights(target("qwen3"))
    assert int8.checksum() == checksum
    assert versions(int8) == {0}
    same(answers(int8), expected)


def test_failed_stream(int8: EnginePool, model_dir: Model, target: Model) -> None:
    """The engine that failed half way has no version. It is out until the next update, or gets
    the old weights from another engine. Then running requests go on as if there was no update."""
    expected, source = answers(int8), in_halves(leaves(target("qwen3")))
    long: dict[str, Any] = {
        "input_ids": [[5, 6, 7]] * 8,
        "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": LONG},
        "return_logprob": True,
    }
    undisturbed = int8.generate_all(**long)
    with callers(1) as executor, refused(source[LEAF]):
        call = executor.submit(int8.generate_all, **long)
        until(lambda: running(int8) > 0)
        with pytest.raises(WeightUpdateFailed, match=FULL) as caught:
            int8.update_weights(source, mode="in_place", staging="stream")
        same(call.result(SECONDS), undisturbed)
    assert (caught.value.engine_index, caught.value.name) == (0, LEAF)
    assert states(int8) == ["serving"] * 4
    del caught
    has(int8, model_dir("qwen3"))
    same(answers(int8), expected)
    with full(0, FOR_EVER), pytest.raises(WeightUpdateFailed, match=FULL):
        int8.update_weights(tensors(target("qwen3")), staging="stream")
    assert states(int8) == ["unloaded", *["serving"] * 3]
    int8.update_weights(target("qwen3"))
    assert states(int8) == ["serving"] * 4
    has(int8, target("qwen3"))


def test_only_engine_of_a_stream(make_pool: MakePool, model_dir: Model, target: Model) -> None:
    """As on a chip without room for a second set. Calls raise until the next update."""
    pool = make_pool("llama", 1, warmup="none", **WEIGHTS)
    with full(0, FOR_EVER), pytest.raises(WeightUpdateFailed, match=FULL):
        pool.update_weights(tensors(target("llama")), staging="stream")
    with pytest.raises(NoWeights, match=FULL):
        answers(pool)
    report = pool.update_weights(model_dir("llama"), weight_version=0)
    has(pool, model_dir("llama"))
    check_report(report, pool, tensors(model_dir("llama")))


def test_opening_takes_one_set_and_a_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never the whole model in its own dtype."""
    from enginepool.weights.quantizer import Quantizer

    gc.collect()
    before, seen = sum(array.nbytes for array in jax.live_arrays()), []
    quantized = Quantizer.quantized

    def looking(*args: Any) -> Any:
        seen.append(sum(array.nbytes for array in jax.live_arrays()) - before)
        return quantized(*args)

    monkeypatch.setattr(Quantizer, "quantized", looking)
    model = make_random_model(tmp_path, "qwen3", num_layers=2, num_heads=2)
    with EnginePool(str(model), devices=1, warmup="none", **SMALL, **WEIGHTS) as pool:
        its = scheduler_of(pool, 0).leaves
        largest = max(spec.size * 4 for spec in its.source_specs.values())
        assert len(seen) == 14  # seven matrices of two layers
        assert max(seen) <= sum(leaf.nbytes for leaf in its.values()) + 2 * largest


def test_streaming_takes_one_set_and_a_leaf(int8: EnginePool, target: Model) -> None:
    given = tensors(target("qwen3"))
    gc.collect()
    before = device_bytes(devices_of(int8))
    with peaks(devices_of(int8)) as most:
        int8.update_weights(given, staging="stream")
    more = max(most[device] - before[device] for device in before)
    assert more <= max(value.nbytes for value in given.values())
    gc.collect()
    assert device_bytes(devices_of(int8)) == before


def test_placeholders(model_dir: Model, target: Model) -> None:
    """A pool that waits for its first weights."""
    options: dict[str, Any] = SMALL | WEIGHTS | {"load_format": "dummy"}
    with EnginePool(str(model_dir("qwen3")), devices=2, **options) as pool:
        pool.update_weights(tensors(target("qwen3")), strategy="rolling")
        has(pool, target("qwen3"))


def by_path(pool: EnginePool) -> Callable[[Params], dict[str, np.ndarray]]:
    """For a checkpoint's weights: the leaves, as upstream makes them."""
    mapping = scheduler_of(pool, 0).hugging_face

    def make(params: Params) -> dict[str, np.ndarray]:
        made = {}
        for path, names in mapping.names.items():
            its = {name: params[name] for name in names}
            (leaf,) = mapping.converter(path, its)(*map(jax.numpy.asarray, its.values()))
            made[path] = np.asarray(leaf)
        return made

    return make


def test_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are stacked and have a scale for each output of each. Narrow ones need a TPU."""
    small: Any = {"num_layers": 1}
    narrow = make_random_model(tmp_path / "narrow", "qwen3_moe", **small)
    with pytest.raises(InvalidConfig, match=r"\.wo has 64 inputs"):
        EnginePool(str(narrow), devices=1, **SMALL, **WEIGHTS).open()
    monkeypatch.setitem(QWEN3_MOE, "moe_intermediate_size", 128)
    models = [
        make_random_model(tmp_path / str(seed), "qwen3_moe", seed, **small) for seed in (1, 2)
    ]
    with EnginePool(str(models[0]), devices=2, warmup="none", **SMALL, **WEIGHTS) as pool:
        has(pool, models[0])
        check_errors(pool.stats()["start"]["quantized"], tensors(models[0]))
        checksums = [pool.checksum()]
        # The second update brings back the weights of the start, so they are served then.
        for source, model in ((from_shards, models[1]), (by_path(pool), models[0])):
            report = pool.update_weights(source(tensors(model)))
            has(pool, model)
            serves_quantized(pool, model)
            check_errors(report.to_dict()["quantized"], tensors(model))
            checksums.append(pool.checksum())
        assert checksums[0] == checksums[2] != checksums[1]
        assert not [event for event in pool.events() if event["event"] == "engine_quarantined"]
        mapping, path = scheduler_of(pool, 0).hugging_face, "model.layers.0.mlp.wi_1"
        its = {name: tensors(models[0])[name] for name in mapping.names[path]}
        assert mapping.converter(path, its).stacks  # so they are quantized one after the other
        odd = {name: value.copy() for name, value in tensors(models[0]).items()}
        odd["model.layers.0.mlp.experts.2.up_proj.weight"][3, 5] = np.inf
        report = pool.update_weights(odd)
        lost = {path for path, its in report.quantized.items() if np.isnan(its.relative_error)}
        assert lost == {"model.layers.0.mlp.wi_1"}
        scales = held(pool, 1)["model.layers.0.mlp.wi_1_scale"]
        assert np.argwhere(np.isnan(scales)).tolist() == [[2, 0, 0, 3]]


@pytest.mark.slow
def test_experts_with_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an expert multiplies is quantized too, a scale for each token."""
    monkeypatch.setitem(QWEN3_MOE, "moe_intermediate_size", 128)
    models = [make_random_model(tmp_path / str(seed), "qwen3_moe", seed) for seed in (1, 2)]
    with EnginePool(str(models[0]), devices=2, warmup="none", **SMALL, **BOTH) as pool:
        serves_quantized(pool, models[0], activations=True)
        pool.update_weights(from_shards(tensors(models[1])))
        has(pool, models[1])
        serves_quantized(pool, models[1], activations=True)


@pytest.mark.slow
def test_room_for_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the new set there must be room for the largest stack as it comes, and for one of its
    experts in the model's dtype, but not for all of them."""
    monkeypatch.setitem(QWEN3_MOE, "moe_intermediate_size", 128)
    model = make_random_model(tmp_path, "qwen3_moe", num_layers=1)
    options: dict[str, Any] = SMALL | WEIGHTS | {"dtype": "bfloat16", "warmup": "none"}
    said: list[int] = []
    arriving = Plan.arriving

    def looking(*args: Any, **kwargs: Any) -> int:
        said.append(arriving(*args, **kwargs))
        return said[-1]

    with EnginePool(str(model), devices=1, **options) as pool:
        monkeypatch.setattr(batches, "BYTES", 0)
        monkeypatch.setattr(Plan, "arriving", looking)
        report = pool.update_weights(tensors(model))
        stack = max(spec.size for spec in scheduler_of(pool, 0).leaves.source_specs.values())
        experts = QWEN3_MOE["num_experts"]
        assert said == [report.nbytes + stack * 4 + stack * 2 // experts]


def test_perturbed(int8: EnginePool) -> None:
    before = int8.checksum()
    int8.perturb_weights(seed=1, scale=0.1, num_leaves=5)
    assert int8.checksum() != before


def test_refused_options() -> None:
    with pytest.raises(InvalidConfig, match="kv_cache_dtype='fp8_e4m3'"):
        EnginePool(devices=1, kv_cache_dtype="fp8_e4m3", **WEIGHTS)
    adapters: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 4}
    adapters["lora_target_modules"] = ["all"]
    with pytest.raises(InvalidConfig, match="beside enable_lora=True"):
        EnginePool(devices=1, **adapters, **WEIGHTS)
