"""Models of random weights, in any size, as Hugging Face directories with the toy's tokenizer."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from scripts.train_toy.checkpoint import CONFIG, parameter_shapes, write_tokenizer

# The least bytes of a model, and a layer's hidden size, MLP size, query heads and KV heads. The
# layers are those of a micro model, of Qwen3-0.6B and of Qwen3-4B. A larger model has larger layers
# and not many more of them, because a hundred layers take minutes to compile.
_LAYERS = {0.0: (256, 1024, 4, 2), 0.1e9: (1024, 3072, 16, 8), 3e9: (2560, 9728, 32, 8)}
_TENSORS_PER_FILE = 100
_BLOCK = (1 << 20) + 7  # no multiple of a row's length, so that rows differ


def sized_config(nbytes: float, dtype: Any) -> dict[str, Any]:
    """The config.json of a Qwen3 whose weights have about so many bytes."""
    shape = next(shape for least, shape in reversed(_LAYERS.items()) if nbytes >= least)
    without, one = (weight_bytes(_config(*shape, layers, dtype)) for layers in (0, 1))
    return _config(*shape, max(1, round((nbytes - without) / (one - without))), dtype)


def micro_config() -> dict[str, Any]:
    """The config.json of a Qwen3 that computes a step in milliseconds, in float32."""
    return _config(*_LAYERS[0.0], 2, "float32")


def nano_config() -> dict[str, Any]:
    """The config.json of the smallest Qwen3 for sglang-jax's attention on CPU. Nearly all of its
    step is the host's work."""
    return _config(128, 128, 1, 1, 1, "float32")


def weight_bytes(config: Mapping[str, Any]) -> int:
    itemsize = jax.numpy.dtype(config["torch_dtype"]).itemsize
    return sum(map(math.prod, parameter_shapes(config).values())) * itemsize


def write_model(
    directory: Path, config: Mapping[str, Any], *, seed: int = 0, std: float = 0.02
) -> Path:
    """Write a checkpoint of random weights. To be fast, it draws one block of normal numbers. Every
    tensor repeats this block, and begins at another place in it."""
    dtype = jax.numpy.dtype(config["torch_dtype"])
    rng = np.random.default_rng(seed)
    block = std * rng.standard_normal(_BLOCK, dtype=np.float32)
    directory.mkdir(parents=True, exist_ok=True)
    shapes = parameter_shapes(config)
    for number, names in enumerate(itertools.batched(shapes, _TENSORS_PER_FILE)):
        part = {}
        for name in names:
            numbers = np.roll(block, int(rng.integers(_BLOCK)))
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            part[name] = np.resize((centre + numbers).astype(dtype), shapes[name])
        save_file(part, directory / f"model-{number:05}.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_tokenizer(directory)
    return directory


def tensors(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of a checkpoint, one after the other."""
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118  no dict
                yield name, opened.get_tensor(name)


def read_model(directory: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The configuration and the weights."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return config, dict(tensors(directory))


def leaf(name: str) -> tuple[str, bool]:
    """The path of the leaf for a Hugging Face tensor, and whether it is transposed."""
    if name.endswith("norm.weight"):
        return name.removesuffix("weight") + "scale", False
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return name.removesuffix("weight") + "embedding", False
    return name, True


def _config(
    hidden: int, mlp: int, heads: int, kv_heads: int, layers: int, dtype: Any
) -> dict[str, Any]:
    return CONFIG | {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "torch_dtype": jax.numpy.dtype(dtype).name,
    }
