"""A Qwen3-MoE with random weights, and checks of the experts in results."""

import base64
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginepool.toy.files import read_checkpoint
from scripts.train_toy.checkpoint import write_checkpoint
from tests.support.families import parameter_shapes, routing
from tests.support.masks import cut
from tests.support.pools import SMALL
from tests.support.reference import random_config
from tests.support.scores import ids

LAYERS, TOP_K, DENSE = 3, 2, 1
SAMPLED = {"temperature": 1.0, "sampling_seed": 3, "ignore_eos": True, "max_new_tokens": 30}
# One prompt is prefilled in chunks.
PROMPTS = [ids(length, length) for length in (3, 150, 40, 1, 70)]
OPTIONS: dict[str, Any] = SMALL | {"moe_backend": "epmoe", "enable_return_routed_experts": True}


def write_mixture(folder: Path, seed: int) -> Path:
    """A Qwen3-MoE whose second layer has no experts."""
    config = random_config("qwen3_moe", LAYERS, 2, 1, np.float32) | {"mlp_only_layers": [DENSE]}
    rng = np.random.default_rng(seed)
    params = {
        name: rng.normal(float(name.endswith("norm.weight")), 0.15, shape).astype(np.float32)
        for name, shape in parameter_shapes(config).items()
    }
    write_checkpoint(folder, params, config, np.float32)
    return folder


def rows_of(meta: dict[str, Any]) -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
    return flat.reshape(-1, LAYERS, TOP_K)


def expected(model: Path, tokens: Sequence[int]) -> np.ndarray:
    """The experts of the reference, sorted."""
    padded = np.zeros((1, SMALL["context_length"]), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.sort(np.asarray(reference(model)(padded))[0, : len(tokens)], axis=-1)


@cache
def reference(model: Path) -> Callable[[np.ndarray], Any]:
    config, params = read_checkpoint(model)
    as_float32 = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    return partial(jax.jit(partial(routing, config)), as_float32)


def assert_rows(model: Path, prompt: list[int], result: Any, start: int = 0, end: int = 0) -> None:
    """Checks the rows from position `start` up to `end`, or to the last."""
    tokens = [*prompt, *result["output_ids"]][:-1]
    rows = rows_of(result["meta_info"])
    assert len(rows) == len(tokens)
    part = slice(start, end or None)
    assert_experts(rows[part], expected(model, tokens)[part])


def assert_experts(rows: np.ndarray, reference: np.ndarray) -> None:
    assert (rows[:, DENSE] == -1).all()
    routed = np.sort(np.delete(rows, DENSE, axis=1), axis=-1)
    np.testing.assert_array_equal(routed, reference)


def first_of(prompt: list[int], result: dict[str, Any]) -> dict[str, Any]:
    """The first half of an output, or all of a short one."""
    count = -(-len(result["output_ids"]) // 2)
    rows = rows_of(result["meta_info"])[: len(prompt) + count - 1]
    experts = {"routed_experts": base64.b64encode(rows.tobytes()).decode()}
    return {"output_ids": result["output_ids"][:count], "meta_info": cut(result, count) | experts}


def alike(results: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    for result, other in zip(results, others, strict=True):
        assert result["output_ids"] == other["output_ids"]
        for name in ("routed_experts", "output_sampling_mask", "finish_reason"):
            assert result["meta_info"][name] == other["meta_info"][name], name
