"""The arithmetic of what fits a TPU agrees with upstream's own model classes and functions."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoConfig

from enginepool import EnginePool
from enginepool.config import PoolConfig
from enginepool.errors import InvalidConfig
from enginepool.sizing import rules
from enginepool.sizing import settings as sizes
from enginepool.sizing.chips import GIB, TOPOLOGIES, V4, V5E, V6E, topology
from enginepool.sizing.kv_size import default_fraction
from enginepool.sizing.memory import Memory, running_requests_cap
from enginepool.sizing.settings import Settings
from enginepool.sizing.shape import FAMILIES, read_shape, shape_of
from tests.support.families import QWEN3_MOE
from tests.support.marks import slow
from tests.support.pools import SMALL
from tests.support.published import CONFIGS, PARAMETERS
from tests.support.reference import make_random_model, random_config
from tests.support.upstream_sizes import on_chip, upstreams_leaves, upstreams_runner


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_upstreams_classes(family: str, tied: bool, tp_size: int) -> None:
    """Parameters and bytes on a chip, with biases, tied and not, and at tp_size=4 with two KV
    heads on four chips."""
    if family == "gemma2" and not tied:
        pytest.skip("upstream's Gemma2 has no head of its own")
    written = random_config(family, 3, 4, 2, np.float32, tied)
    if family == "qwen3":
        written["attention_bias"] = True
    if family == "qwen3_moe":
        written |= {"mlp_only_layers": [1], "num_experts": 8}
    for dtype, name in ((jnp.bfloat16, "bfloat16"), (jnp.float32, "float32")):
        shape = shape_of(AutoConfig.for_model(**written), name)
        leaves = upstreams_leaves(AutoConfig.for_model(**written), tp_size, dtype)
        each = [on_chip(path, leaf, tp_size) for path, leaf in leaves.items()]
        assert shape.weight_bytes(tp_size) == sum(each)
        if tp_size == 1:
            assert shape.parameters == sum(leaf.size for leaf in leaves.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_published_models(name: str) -> None:
    """The shipped configurations have the parameters of their published checkpoints, in
    upstream's classes, too."""
    shape = read_shape(CONFIGS[name])
    assert shape.parameters == PARAMETERS[name]
    leaves = upstreams_leaves(AutoConfig.from_pretrained(CONFIGS[name]), 1, jnp.bfloat16)
    assert shape.weight_bytes() == sum(on_chip(*leaf, 1) for leaf in leaves.items())


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("qwen3_moe", {"moe_backend": "epmoe", "quantization_config_path": "int8_w8a8.yaml"}),
        *slow(
            ("llama", {"quantization_config_path": "int8.yaml"}),
            ("qwen3_moe", {"moe_backend": "epmoe"}),
        ),
    ],
)
def test_weights_and_kv_are_those_of_an_engine(
    family: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one of the two devices of a real engine, byte by byte."""
    monkeypatch.setitem(QWEN3_MOE, "moe_intermediate_size", 256)
    model = make_random_model(tmp_path, family, num_layers=2, num_heads=4, tied=False)
    options = SMALL | {"dtype": "bfloat16"} | more
    with EnginePool(str(model), devices=1, tp_size=2, warmup="none", **options) as pool:
        scheduler = pool.engines[0].scheduler_info["scheduler"]
        runner = scheduler.tp_worker.worker.model_runner
        config = PoolConfig(str(model), tp_size=2, server_args=options | {"page_size": 1})
        memory = config.tpu_memory(config.for_engine("tpu", [0, 1], GIB), GIB)
        assert memory is not None
        assert memory.weights == sum(map(on_first, scheduler.leaves.values()))
        assert memory.kv_per_token == runner._compute_cell_size()
        assert memory.kv_tokens == scheduler.max_total_num_tokens
        pools = jax.tree.leaves(runner.memory_pools)
        held = [leaf for leaf in pools if isinstance(leaf, jax.Array) and leaf.ndim > 2]
        assert memory.kv == sum(map(on_first, held))


def on_first(array: jax.Array) -> int:
    """Bytes on the array's first device."""
    return array.addressable_shards[0].data.nbytes


@pytest.mark.parametrize("tp_size", [1, 4, 8])
@pytest.mark.parametrize("most", [None, 10_000])
@pytest.mark.parametrize("page", [1, 16, 128])
def test_kv_tokens_are_upstreams(page: int, most: int | None, tp_size: int) -> None:
    """By upstream's own methods: bytes a token (KV heads replicated if chips outnumber them,
    heads padded to 128 lanes) and tokens in whole pages at a memory fraction."""
    shape = replace(read_shape(CONFIGS["4B"]), head_dim=80, kv_heads=2)
    settings = Settings(4096, page, 0.7, tp_size, max_total_tokens=most)
    memory = Memory(shape, settings, V6E.hbm_bytes)
    runner = upstreams_runner(shape, memory)
    assert memory.kv_per_token == runner._compute_cell_size()
    tokens = runner.profile_max_num_token(memory.free)
    tokens = runner._apply_token_constraints(tokens, most, 1)
    assert memory.kv_tokens == pytest.approx(tokens, abs=page)  # floats in both
    assert memory.kv_tokens % page == 0


@pytest.mark.parametrize(
    ("context", "page", "cap"),
    [(4096, 1, 32), (40_960, 1, 3), (4096, 128, 4096), (4097, 128, 3971), (40_960, 128, 409)],
)
def test_cap_on_running_requests_is_upstreams(context: int, page: int, cap: int) -> None:
    from sgl_jax.srt.layers.attention.flashattention_backend import FlashAttention

    assert running_requests_cap(context, page) == cap
    assert FlashAttention.get_max_running_reqests(context, page) == cap


def test_no_room_for_one_request_is_where_upstream_fails() -> None:
    from sgl_jax.srt.layers.attention.flashattention_backend import FlashAttention

    assert running_requests_cap(200_000, 1) == 0
    with pytest.raises(AssertionError, match="larger than 0"):
        FlashAttention.get_max_running_reqests(200_000, 1)


def test_upstreams_defaults_are_known() -> None:
    from sgl_jax.srt.server_args import ServerArgs
    from sgl_jax.srt.utils import common_utils

    args: Any = ServerArgs(model_path="m", tokenizer_path="m", device="cpu")
    fields = {name: field.default for name, field in ServerArgs.__dataclass_fields__.items()}
    assert (args.chunked_prefill_size, fields["max_prefill_tokens"]) == (sizes.CHUNK, 16384)
    assert list(sizes.TOKEN_PADDINGS) == common_utils.PRECOMPILE_DEFAULT_TOKEN_PADDINGS
    assert list(sizes.BATCH_PADDINGS) == common_utils.PRECOMPILE_DEFAULT_BS_PADDINGS
    assert fields["page_size"] == 1


def test_upstreams_default_fraction_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl_jax.srt.server_args import ServerArgs

    monkeypatch.setenv("JAX_PLATFORMS", "tpu")  # its default depends on the device alone
    args: Any = ServerArgs(model_path="m", tokenizer_path="m", device="tpu")
    assert args.mem_fraction_static == sizes.FRACTION


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    ],
)
def test_context_is_upstreams(scaling: dict[str, Any] | None) -> None:
    from sgl_jax.srt.hf_transformers_utils import get_context_length

    config = AutoConfig.for_model(
        **random_config("llama", 1, 4, 2, np.float32) | {"rope_scaling": scaling}
    )
    assert shape_of(config).context == get_context_length(config)


def test_reading_a_configuration(tmp_path: Path) -> None:
    """A directory, a file, overrides as upstream takes them. If something cannot be counted, the
    error says why."""
    (tmp_path / "config.json").write_bytes(Path(CONFIGS["0.6B"]).read_bytes())
    assert read_shape(str(tmp_path)) == read_shape(CONFIGS["0.6B"])
    assert read_shape(str(tmp_path), {"model_layer_nums": 2}).layers == 2
    assert read_shape(str(tmp_path), {"dtype": "half"}).itemsize == 2
    override = {"json_model_override_args": '{"max_position_embeddings": 8192}'}
    assert read_shape(str(tmp_path), override).context == 8192
    with pytest.raises(InvalidConfig, match="the configuration cannot be read"):
        read_shape(str(tmp_path / "nothing"))
    with pytest.raises(InvalidConfig, match="a quantized checkpoint"):
        read_shape(str(tmp_path), {"quantization": "fp8"})
    with pytest.raises(InvalidConfig, match=r"path='nothing\.yaml'.*not found"):
        read_shape(str(tmp_path), {"quantization_config_path": "nothing.yaml"})
    with pytest.raises(InvalidConfig, match="without blocks"):
        read_shape(str(tmp_path), {"quantization_config_path": "int8_block_128_dynamic.yaml"})
    with pytest.raises(InvalidConfig, match="dtype='int4': expected one of float32"):
        read_shape(str(tmp_path), {"dtype": "int4"})
    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    with pytest.raises(InvalidConfig, match="model_type='opt' are unknown; known are llama"):
        read_shape(str(tmp_path))
    config = random_config("qwen3_moe", 3, 4, 2, np.float32) | {"mlp_only_layers": [1, 2]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(str(tmp_path)).dense_layers == 2
    # Layer 2 is left out.
    assert read_shape(str(tmp_path), {"model_layer_nums": 2}).dense_layers == 1


def test_rules_of_ones_own(tmp_path: Path) -> None:
    """Upstream takes Qwix's names of fields, too. If sizes are not known, the error says so."""
    file = tmp_path / "rules.yaml"

    def read(*rules: dict[str, Any]) -> Any:
        moe = {"weight_dtype": None}
        file.write_text(json.dumps({"quantization": {"linear": {"rules": rules}, "moe": moe}}))
        return read_shape(CONFIGS["0.6B"], {"quantization_config_path": str(file)})

    int8 = {"module_path": ".*", "weight_dtype": "int8"}
    assert read(int8).linear_itemsize == 1
    assert read({"module_path": ".*", "weight_qtype": "int8"}) == read(int8)
    for rule in (int8 | {"weight_block_size": [128, 128]}, int8 | {"weight_dtype": "int4"}):
        with pytest.raises(InvalidConfig, match=r"rules\.yaml.*alike, without blocks"):
            read(rule)
    for rule in (int8 | {"module_path": "("}, {"weight_dtype": "int8"}):
        with pytest.raises(InvalidConfig, match=r"rules\.yaml.*cannot be read"):
            read(rule)
    for text in ("quantization: [", "", "quantization: 8"):
        file.write_text(text)
        with pytest.raises(InvalidConfig, match=r"rules\.yaml.*cannot be read"):
            read_shape(CONFIGS["0.6B"], {"quantization_config_path": str(file)})


def test_topologies() -> None:
    assert {name: found.chips for name, found in TOPOLOGIES.items()} == {
        "v4-8": 4,
        "v5e-1": 1,
        "v5e-4": 4,
        "v5e-8": 8,
        "v6e-1": 1,
        "v6e-4": 4,
        "v6e-8": 8,
    }
    assert [chip.hbm_bytes / GIB for chip in (V4, V5E, V6E)] == [30.75, 15.75, 31.25]
    with pytest.raises(InvalidConfig, match=r"topology 'v5e-16': .*v5e-8.*; did you mean v5e-1"):
        topology("v5e-16")


def pool_memory(model: str, free: int, **server_args: Any) -> Memory:
    config = PoolConfig(CONFIGS[model], server_args=server_args)
    found = config.tpu_memory(config.for_engine("tpu", [0], free), free)
    assert found is not None
    return found


def test_default_fraction_leaves_room_for_a_second_set() -> None:
    """It is the largest hundredth with room for that, beside KV for 16 requests of the context."""
    memory = pool_memory("4B", V4.hbm_bytes, context_length=4096)
    fraction = memory.settings.fraction
    assert fraction == memory.live_swap_fraction == 0.7
    assert memory.second_set_fits
    settings = replace(memory.settings, fraction=fraction + 0.01)
    assert not replace(memory, settings=settings).second_set_fits
    assert memory.requests_at_context >= 16
    used = 2 * memory.weights + memory.kv + memory.reserve
    assert used <= V4.hbm_bytes < used + 0.01 * V4.hbm_bytes + memory.kv_per_token * 128


@pytest.mark.parametrize(
    ("model", "chip", "context"),
    [
        ("4B", V4, 40_960),  # KV for two requests
        ("8B", V6E, 1024),
    ],
)
def test_default_fraction_is_upstreams_otherwise(model: str, chip: Any, context: int) -> None:
    memory = pool_memory(model, chip.hbm_bytes, context_length=context)
    assert memory.settings.fraction == 0.88
    assert rules.staging(memory) == "stream"


def test_default_fraction_leaves_programs_their_room() -> None:
    """Two sets of Qwen3-4B leave none on a v5e. With one set, 0.88 leaves too little for a
    program for each bucket of requests."""
    buckets = {"precompile_bs_paddings": list(range(8, 257, 8))}
    memory = pool_memory("4B", V5E.hbm_bytes, context_length=4096, **buckets)
    assert memory.settings.fraction == 0.87
    assert rules.staging(memory) == "stream"
    assert memory.serves
    assert not replace(memory, settings=replace(memory.settings, fraction=0.88)).serves


def test_default_fraction_leaves_temporaries_their_room() -> None:
    """Gemma2's vocabulary makes logits of 262 MB for 256 requests, and 0.88 leaves too little."""
    shape = shape_of(AutoConfig.for_model("gemma2"), "bfloat16")
    args = {**rules.TPU_DEFAULTS, "context_length": 8192}
    args["mem_fraction_static"] = default_fraction(shape, args, V5E.hbm_bytes)
    assert args["mem_fraction_static"] == 0.87
    memory = Memory(shape, Settings.of(args, shape), V5E.hbm_bytes)
    assert memory.serves
    assert not replace(memory, settings=replace(memory.settings, fraction=0.88)).serves


@pytest.mark.parametrize(("gib", "arguments"), [(16, 15.12e9), (32, 30.24e9)])
def test_weights_and_kv_are_those_that_the_compiler_saw(gib: int, arguments: float) -> None:
    """The arguments of Qwen3-4B's decode program, compiled ahead of time for v5e and v6e.
    Upstream was given their nominal HBM."""
    shape = read_shape(CONFIGS["4B"])
    memory = Memory(shape, Settings(4096, 128, 0.88), gib * GIB)
    assert memory.weights + memory.kv == pytest.approx(arguments, rel=0.005)


def test_default_fraction_is_never_more_than_upstreams() -> None:
    memory = pool_memory("0.6B", V6E.hbm_bytes, context_length=4096)
    assert memory.live_swap_fraction is not None
    assert memory.live_swap_fraction > memory.settings.fraction == 0.88
    assert rules.staging(memory) == "double"


def test_the_fraction_is_of_what_the_engine_finds() -> None:
    """A trainer on the chip leaves less memory, to which the same rule applies."""
    alone = pool_memory("0.6B", V5E.hbm_bytes, context_length=1024)
    beside = pool_memory("0.6B", V5E.hbm_bytes - 8 * GIB, context_length=1024)
    assert beside.settings.fraction < alone.settings.fraction
    assert beside.second_set_fits
    assert alone.second_set_fits


def test_kv_that_the_user_limits_leaves_room() -> None:
    memory = pool_memory("4B", V6E.hbm_bytes, context_length=40_960, max_total_tokens=65_536)
    assert memory.kv_tokens == 65_536
    assert memory.second_set_fits


def problems(model: str, free: int, **server_args: Any) -> list[str]:
    config = PoolConfig(CONFIGS[model], server_args=server_args)
    found = config.tpu_advice(config.for_engine("tpu", [0], free), free)
    assert all(entry.remedy for entry in found)
    return [f"{entry.problem} → {entry.remedy}" for entry in found]


def test_defaults_need_no_advice() -> None:
    for context in (1024, 4096, 32_768):
        assert problems("0.6B", V5E.hbm_bytes, context_length=context) == []
        assert problems("4B", V4.hbm_bytes, context_length=context) == []


def test_small_pages_are_advised_against() -> None:
    page, cap = problems(
        "0.6B", V5E.hbm_bytes, context_length=4096, page_size=1, max_running_requests=64
    )
    assert "page_size=1: below 16" in page
    assert "leave page_size out (128 on a TPU)" in page
    assert "runs at most 32 at context_length=4096 and page_size=1 (524,288 // 4096" in cap
    assert "page_size=128 allows 4096" in cap
    assert problems("0.6B", V5E.hbm_bytes, context_length=4096, page_size=16) == []
    # Without room for the page numbers of one request, nothing is known about its memory.
    _, cap = problems("0.6B", V6E.hbm_bytes, context_length=200_000, page_size=1)
    assert "runs at most 0 at context_length=200000" in cap


def test_smaller_pages_are_suggested_if_the_user_chose_none() -> None:
    """Only if upstream runs as many requests with them. A plan says so, a starting pool does
    not."""
    (offer,) = rules.page_offer(pool_memory("0.6B", V5E.hbm_bytes, context_length=4096), {})
    assert offer.problem.startswith("page_size=128: samples of one prompt share only whole pages")
    assert "page_size=32" in offer.remedy
    # 524,288 // 1,280 pages // 4 = 102 of the 256 that may run
    long = pool_memory("0.6B", V5E.hbm_bytes, context_length=40_960)
    assert rules.page_offer(long, {}) == []
    for page in (16, 128):
        chosen = pool_memory("0.6B", V5E.hbm_bytes, context_length=4096, page_size=page)
        assert rules.page_offer(chosen, {"page_size": page}) == []


def test_fractions_outside_the_rule_are_advised_against() -> None:
    (room,) = problems("4B", V4.hbm_bytes, context_length=4096, mem_fraction_static=0.97)
    assert "mem_fraction_static=0.97 leaves too little for programs and temporaries" in room
    (second,) = problems("4B", V4.hbm_bytes, context_length=4096, mem_fraction_static=0.88)
    assert 'staging="stream"' in second
    assert "mem_fraction_static=0.7 has room for both and 102144 KV tokens" in second
    assert problems("4B", V4.hbm_bytes, context_length=4096, mem_fraction_static=0.6) == []


def test_a_model_that_does_not_fit_is_reported() -> None:
    (small,) = problems("8B", V5E.hbm_bytes, context_length=4096)
    assert "0 KV tokens at mem_fraction_static=0.88 (16.38 GB of weights in 16.91)" in small
    assert "a larger tp_size" in small


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("page_size", 0, "page_size=0: expected a count"),
        ("page_size", "big", "page_size='big': expected a count"),
        ("mem_fraction_static", 88, "mem_fraction_static=88: expected a number above 0"),
    ],
)
def test_values_that_cannot_be_computed_with(option: str, value: Any, words: str) -> None:
    config = PoolConfig(CONFIGS["0.6B"], server_args={option: value})
    with pytest.raises(InvalidConfig, match=words):
        config.tpu_advice(config.for_engine("tpu", [0], GIB), GIB)
