"""A quantized model does not quantize other models of the same files."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import patches
from patches import shared_config
from patches._lookup import module

PATCH = shared_config.PATCH


def after_a_quantized_one(model_dir: Callable[[str], Path], folder: Path) -> Any:
    """The quantization of the second configuration of a model."""
    model = str(shutil.copytree(model_dir("qwen3"), folder / "model"))  # upstream caches by path
    make = module("sgl_jax.srt.configs.model_config").ModelConfig
    assert make(model, quantization_config_path="int8.yaml").quantization_config is not None
    return make(model).quantization_config


@pytest.mark.skipif(not PATCH.is_needed(), reason="upstream copies the configuration itself")
def test_upstream_shares_it(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    assert after_a_quantized_one(model_dir, tmp_path) is not None


def test_each_has_its_own(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    patches.apply([PATCH])
    assert after_a_quantized_one(model_dir, tmp_path) is None
