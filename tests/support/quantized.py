"""Quantized weights by NumPy, and what engines ought to answer with them, by plain JAX."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginepool import EnginePool
from enginepool.toy.files import read_checkpoint
from tests.support import families
from tests.support.faults import scheduler_of
from tests.support.layouts import PROMPTS, answers

_LENGTH = 48
# XLA divides by a constant, and by what is the same for a whole row, as a multiplication by the
# reciprocal, in most programs. A division differs in the last bit.
_ONE = np.float32(1)
_STEP = _ONE / np.float32(127)


def quantize(weight: np.ndarray, *, divide: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Integers and scales of a matrix, stored (out, in): a scale for each output."""
    wide = weight.astype(np.float32)
    scale = np.abs(wide).max(axis=1) * _STEP
    step = np.where(scale == 0, _ONE, scale)[:, None]
    steps = wide / step if divide else wide * (_ONE / step)
    return np.clip(np.rint(steps), -128, 127).astype(np.int8), scale


def is_matrix(name: str) -> bool:
    return name.endswith("_proj.weight")


def expected_leaves(
    params: Mapping[str, np.ndarray], *, divide: bool = False
) -> dict[str, np.ndarray]:
    """What an engine holds of a checkpoint's matrices, by leaf path."""
    found = {}
    for name, weight in params.items():
        if is_matrix(name) and ".experts." not in name:
            found[f"{name}_q"], found[f"{name}_scale"] = quantize(weight, divide=divide)
    return found


def held(pool: EnginePool, index: int) -> dict[str, np.ndarray]:
    """The integers and scales of an engine."""
    leaves = scheduler_of(pool, index).leaves
    return {path: np.asarray(leaves[path]) for path in leaves if ".weight_" in path}


class Int8:
    """Stands for a matrix whose product quantizes the other factor too."""

    def __init__(self, weight: np.ndarray) -> None:
        self._integers, self._scale = quantize(weight)

    @property
    def T(self) -> "Int8":
        return self

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        scale = jnp.abs(x).max(axis=-1, keepdims=True) / 127
        integers = jnp.rint(x / jnp.where(scale == 0, 1, scale))
        return integers @ self._integers.T.astype(np.float32) * scale * self._scale


def serves_quantized(
    pool: EnginePool, model: Path, *, activations: bool = False, within: float = 1e-3
) -> None:
    """Every engine answers as plain JAX does with the checkpoint's weights in int8."""
    config, params = read_checkpoint(model)
    matrices: dict[str, Any] = {name: jnp.asarray(value) for name, value in params.items()}
    for name, weight in params.items():
        if is_matrix(name):
            integers, scale = quantize(weight)
            whole = integers.astype(np.float32) * scale[:, None]
            matrices[name] = Int8(weight) if activations else jnp.asarray(whole)

    with jax.default_matmul_precision("highest"):
        logits = jax.jit(functools.partial(families._logits, config, matrices))
        assert pool.checksum()  # an error if the engines differ
        for prompt, result in zip(PROMPTS, answers(pool), strict=True):
            ids = np.array([*prompt, *result["output_ids"]])
            assert len(ids) <= _LENGTH, json.dumps(ids.tolist())
            rows = logits(np.pad(ids, (0, _LENGTH - len(ids))))[len(prompt) - 1 : len(ids) - 1]
            told = np.array([each[0] for each in result["meta_info"]["output_token_logprobs"]])
            chosen = np.asarray(rows)[np.arange(len(rows)), ids[len(prompt) :]]
            np.testing.assert_allclose(
                told, chosen - jax.nn.logsumexp(rows, axis=-1), rtol=0, atol=within
            )
            np.testing.assert_allclose(chosen, np.asarray(rows).max(axis=1), rtol=0, atol=within)
