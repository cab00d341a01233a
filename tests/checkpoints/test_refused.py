"""A configuration that engines do not compute is refused by name, or logged."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from enginepool import EnginePool, InvalidConfig
from enginepool.config import PoolConfig
from enginepool.engine.config_reads import noted_reads
from enginepool.model_config.config_json import as_read
from enginepool.model_config.unsupported import check_reads, refuse
from tests.support.checkpoints import FAMILIES, make
from tests.support.pools import SMALL
from tests.support.published import CONFIGS
from tests.support.reference import random_config

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
GPTQ = {"quant_method": "gptq", "bits": 4}
INT8 = {"quant_method": "compressed-tensors", "format": "int-quantized"}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}


def config_of(family: str, **fields: Any) -> dict[str, Any]:
    return as_read(random_config(family, 2, 4, 2, np.float32) | fields)


@pytest.mark.parametrize(
    ("family", "fields", "why"),
    [
        ("llama", {"quantization_config": AWQ}, "quantization_config has quant_method='awq'"),
        ("qwen3", {"quantization_config": GPTQ}, "quantization_config has quant_method='gptq'"),
        ("qwen2", {"compression_config": INT8}, "compression_config.*format='int-quantized'"),
        ("other", {"quantization_config": AWQ}, "quant_method='awq'"),
        ("llama", {"quantization_config": "int4"}, "quant_method=None"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ("qwen3", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ("qwen2", {"rope_parameters": LONG}, "rope_type='longrope'"),
        ("llama", {"rope_scaling": LLAMA3}, "high_freq_factor"),
        ("llama", {"rope_theta": "1e6"}, "rope_theta='1e6': expected a number"),
        ("qwen3", {"rope_scaling": YARN | {"factor": "2.0"}}, "factor='2.0' of rope_scaling"),
        ("qwen3", {"rope_scaling": YARN | {"factor": 0}}, "factor=0 of rope_scaling"),
        ("gemma2", {"attention_bias": True}, "attention_bias=True: the gemma2"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias=True: the qwen3_moe"),
    ],
)
def test_refused_before_anything_is_built(family: str, fields: dict[str, Any], why: str) -> None:
    base = config_of("llama" if family == "other" else family)
    model_type = "chameleon" if family == "other" else family
    with pytest.raises(InvalidConfig, match=f"config.json: .*{why}"):
        refuse(as_read(base | {"model_type": model_type} | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"quantization_config": {"quant_method": "fp8"}},
        {"quantization_config": INT8 | {"format": "float-quantized"}},
        {"quantization_config": {}, "rope_scaling": None},
        {"rope_scaling": {"rope_type": "default"}},
    ],
)  # fmt: skip
def test_not_refused(fields: dict[str, Any]) -> None:
    for family in FAMILIES:
        refuse(config_of(family, **fields))


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The fields that upstream reads of a family's configuration while it makes the model,
    without weights."""

    @cache
    def find(family: str) -> frozenset[str]:
        from sgl_jax.srt.configs.model_config import ModelConfig
        from sgl_jax.srt.models.registry import ModelRegistry
        from sgl_jax.srt.server_args import ServerArgs

        folder = tmp_path_factory.mktemp(family)
        (folder / "config.json").write_text(json.dumps(config_of(family)))
        args = ServerArgs(**PoolConfig(str(folder)).for_engine("cpu", [0]))
        mesh = Mesh(
            np.array(jax.devices()[:1]).reshape(1, 1),
            ("data", "tensor"),
            axis_types=(AxisType.Explicit,) * 2,
        )
        with noted_reads() as found:
            config = ModelConfig.from_server_args(args)
            config.configure_for_tensor_parallel(1)
            config.hf_config.ep_size, config.hf_config.moe_backend = 1, "epmoe"
            model, _ = ModelRegistry.resolve_model_cls(config.hf_config.architectures)
            with jax.set_mesh(mesh):
                nnx.eval_shape(lambda: model(config.hf_config, dtype=config.dtype, mesh=mesh))
        assert type(config.hf_config).__module__.startswith("transformers.")
        return frozenset(found)

    return find


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"mlp_bias": True}),
        ("llama", {"hidden_act": "gelu"}),
        ("qwen2", {"hidden_act": "gelu"}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16}),
        ("qwen3", {"hidden_act": "relu"}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
        ("qwen3_moe", {"hidden_act": "gelu"}),
        ("gemma2", {"hidden_activation": "gelu"}),
        ("gemma2", {"tie_word_embeddings": False}),
        ("gemma2", {"use_bidirectional_attention": True}),
    ],
)
def test_a_field_that_nothing_reads_is_refused(
    reads: Any, family: str, fields: dict[str, Any]
) -> None:
    name, value = next(iter(fields.items()))
    with pytest.raises(InvalidConfig, match=f"{name}={value!r}: the {family} of this sglang-jax"):
        check_reads(config_of(family, **fields), reads(family), caps=True)
    # If it had been read, it would pass.
    check_reads(config_of(family, **fields), reads(family) | {name}, caps=True)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        *((family, {}) for family in FAMILIES),
        ("llama", {"hidden_act": "swish", "mlp_bias": False, "attention_bias": True}),
        ("llama", {"attention_dropout": 0.1, "initializer_range": 1.0, "pretraining_tp": 2}),
        ("qwen2", {"attention_bias": False, "use_mrope": False, "some_list": []}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
        ("qwen3_moe", {"mlp_only_layers": [0], "output_router_logits": True}),
        ("gemma2", {"hidden_act": "silu", "cache_implementation": "hybrid"}),
    ],
)
def test_nothing_to_say(
    reads: Any, caplog: pytest.LogCaptureFixture, family: str, fields: dict[str, Any]
) -> None:
    found = reads(family)
    caplog.clear()  # of what upstream says while it is asked
    check_reads(config_of(family, **fields), found, caps=True)
    assert not caplog.records


@pytest.mark.parametrize("name", CONFIGS)
def test_published_models_pass(reads: Any, caplog: pytest.LogCaptureFixture, name: str) -> None:
    fields = as_read(json.loads(Path(CONFIGS[name]).read_text()))
    refuse(fields)
    check_reads(fields, reads(fields["model_type"]), caps=True)
    assert not caplog.records


def test_what_is_unknown_is_a_warning(reads: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The warning has its name and value."""
    fields = config_of("qwen3", residual_scale=0.5, use_cache=False, nothing=None)
    check_reads(fields, reads("qwen3"), caps=True)
    (record,) = caplog.records
    assert (record.message, record.levelname) == ("enginepool.config_not_read", "WARNING")
    assert record.fields == {"residual_scale": 0.5}


def test_a_cap_that_attention_does_not_know(reads: Any) -> None:
    fields = config_of("gemma2", attn_logit_softcapping=50.0)
    check_reads(fields, reads("gemma2"), caps=True)
    with pytest.raises(InvalidConfig, match=r"attn_logit_softcapping=50.0.*json_model_override"):
        check_reads(fields, reads("gemma2"), caps=False)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"mlp_bias": True}),
        ("qwen3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("gemma2", {"attn_logit_softcapping": 50.0}),
        ("gemma2", {"tie_word_embeddings": False}),
    ],
)
def test_such_a_pool_does_not_open(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    """The error names the field, whatever the weights are."""
    tied = fields.get("tie_word_embeddings", family != "llama")
    folder = make(tmp_path, family, config=fields, tied=tied)
    pool = EnginePool(str(folder), devices=1, warmup="none", **SMALL)
    with pytest.raises(InvalidConfig, match=r"config\.json: .*" + next(iter(fields))):
        pool.open()
    pool.close()
