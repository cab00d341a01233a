"""Reads a checkpoint as an engine reads it when a pool opens, without the engine."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

import patches
from patches._lookup import module


def read(folder: Path, devices: int = 1, **config: Any) -> dict[str, np.ndarray]:
    """The model's leaves by path. Raises the error with which a pool would not open.

    Args:
        config: Fields of upstream's ModelConfig. The dtype is float32 by default.
    """
    applied = patches.apply()
    try:
        return _read(folder, devices, {"dtype": "float32"} | config)
    finally:
        patches.revert(applied)


def _read(folder: Path, devices: int, config: dict[str, Any]) -> dict[str, np.ndarray]:
    from enginepool.weights.loader import loader_for  # it imports upstream

    where = np.array(jax.devices()[:devices]).reshape(1, devices)
    mesh = Mesh(where, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    model_config = module("sgl_jax.srt.configs.model_config").ModelConfig(str(folder), **config)
    # As in upstream's model runner before it loads.
    model_config.hf_config.ep_size = 1
    model_config.hf_config.ep_num_redundant_experts = 0
    model_config.hf_config.moe_backend = model_config.moe_backend.value
    model_config.configure_for_tensor_parallel(devices)
    load_config = module("sgl_jax.srt.configs.load_config").LoadConfig(load_format="auto")
    model: Any = loader_for(mesh)(load_config).load_model(model_config=model_config)
    flat = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): np.asarray(leaf.get_value()) for path, leaf in flat}


def same_leaves(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    """Two models have the same values."""
    assert one.keys() == other.keys()
    for path, leaf in one.items():
        np.testing.assert_array_equal(leaf, other[path])
