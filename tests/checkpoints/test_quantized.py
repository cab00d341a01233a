"""Quantized checkpoints with their writers' tensors are computed, or refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import serialize_file

from enginepool import EnginePool, InvalidConfig, InvalidWeights
from tests.support.checkpoints import FILE, Tensors, make
from tests.support.layouts import tensors
from tests.support.pools import SMALL
from tests.support.quantized import held, quantize

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FLOAT = {"quant_method": "compressed-tensors", "format": "float-quantized"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False}


def gptq(name: str, weight: np.ndarray) -> Tensors:
    rows, columns = weight.shape
    return {
        f"{name}.qweight": np.zeros((columns // 8, rows), np.int32),
        f"{name}.qzeros": np.zeros((1, rows // 8), np.int32),
        f"{name}.scales": np.ones((1, rows), np.float16),
        f"{name}.g_idx": np.zeros(columns, np.int32),
    }


def fp8(name: str, weight: np.ndarray) -> Tensors:
    scale = np.abs(weight).max(axis=1, keepdims=True) / 448
    return {
        f"{name}.weight": (weight / scale).astype(ml_dtypes.float8_e4m3fn),
        f"{name}.weight_scale": scale.astype(np.float32),
    }


def write(
    folder: Path, family: str, form: Callable[[str, np.ndarray], Tensors], **config: Any
) -> Path:
    make(folder, family, config=config)
    written: Tensors = {}
    for name, weight in tensors(folder).items():
        layer = name.removesuffix(".weight")
        written |= form(layer, weight) if layer.endswith("_proj") else {name: weight}
    entries = {
        name: {"dtype": value.dtype.name, "shape": value.shape, "data": value.tobytes()}
        for name, value in written.items()
    }
    serialize_file(entries, folder / FILE, {"format": "pt"})
    return folder


def pool_on(folder: Path, **options: Any) -> EnginePool:
    return EnginePool(str(folder), devices=1, warmup="none", **SMALL, **options)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize(
    ("form", "said", "error", "says"),
    [
        (gptq, GPTQ, InvalidConfig, "quantization_config has quant_method='gptq'"),
        (gptq, None, InvalidWeights, r"unknown \d+ names: \S+_proj\.g_idx"),
        (fp8, None, InvalidWeights, r"unknown \d+ names: \S+_proj\.weight_scale"),
    ],
    ids=["gptq", "gptq, not said", "fp8, not said"],
)
def test_not_computed(
    tmp_path: Path, family: str, form: Any, said: Any, error: type[Exception], says: str
) -> None:
    folder = write(tmp_path, family, form, **({"quantization_config": said} if said else {}))
    with pytest.raises(error, match=says):
        pool_on(folder).open()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma2"])
@pytest.mark.parametrize("said", [FP8, FLOAT], ids=["fp8", "compressed-tensors"])
def test_a_family_without_fp8(tmp_path: Path, family: str, said: dict[str, Any]) -> None:
    """Upstream's model of this family has no place for fp8 weights."""
    folder = write(tmp_path, family, fp8, quantization_config=said)
    says = r"quantization_config: \w+ForCausalLM .*no quantized weights, \d+ weights: .*weight_q"
    with pytest.raises(InvalidConfig, match=says):
        pool_on(folder).open()


def test_fp8_of_other_names(tmp_path: Path) -> None:
    """A family that reads fp8 has its own names for scales. The error names missing ones. In the
    older upstream no family reads fp8."""
    folder = write(tmp_path, "qwen3_moe", fp8, quantization_config=FP8)
    says = r"missing \d+ names: \S+\.weight_scale_inv|reads no quantized weights"
    with pytest.raises((InvalidWeights, InvalidConfig), match=says):
        pool_on(folder).open()


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "fp8.yaml"), ("qwen2", "int8_w8a8.yaml"), ("gemma2", "int8.yaml")],
)
def test_quantized_while_it_opens(tmp_path: Path, family: str, kind: str) -> None:
    """A pool that opens has NumPy's numbers, bit by bit, serves, and takes new weights. A prefill
    uses every layer."""
    folder = make(tmp_path, family)
    name = "model.layers.0.mlp.up_proj.weight"
    with pool_on(folder, quantization_config_path=kind) as pool:
        params = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
        [result] = pool.generate_all(["a"], params)
        checksum = pool.checksum()
        found = held(pool, 0)
        numbers, scales = quantize(tensors(folder)[name], found[f"{name}_q"].dtype)
        np.testing.assert_array_equal(found[f"{name}_q"], numbers, strict=True)
        np.testing.assert_array_equal(found[f"{name}_scale"], scales, strict=True)
        assert pool.update_weights(tensors(folder)).staged == checksum
    assert len(result["output_ids"]) == 1
