"""Weights quantized by NumPy, and the answers that engines must give with them, by plain JAX."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginepool import EnginePool, SwapReport
from enginepool.toy.files import read_checkpoint
from enginepool.weights.fingerprint import fingerprints
from tests.support import families
from tests.support.faults import scheduler_of
from tests.support.layouts import PROMPTS, answers, own_layout, tensors
from tests.support.liveness import until

_LENGTH = 48
_ONE = np.float32(1)
_EXPERTS = {"gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo"}


def quantize(weight: np.ndarray, to: Any = np.int8) -> tuple[np.ndarray, np.ndarray]:
    """The integers, or numbers of fp8, and scales of a matrix or of stacked ones, stored
    (…, out, in), with a scale for each output. A scale that is subnormal counts as zero."""
    wide = weight.astype(np.float32)
    most = np.float32((np.iinfo if to == np.int8 else jnp.finfo)(to).max)
    scale = np.abs(wide).max(axis=-1) * (_ONE / most)
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(0), scale)
    with np.errstate(invalid="ignore"):  # infinity, divided by itself
        exact = np.nan_to_num(wide * (_ONE / np.where(scale == 0, _ONE, scale))[..., None])
    return (np.rint(exact) if to == np.int8 else exact).astype(to), scale


def errors(weight: np.ndarray) -> tuple[float, float]:
    """The norm of the change by quantizing relative to the norm of the matrix, and the largest
    change of an element."""
    integers, scale = quantize(weight)
    wide = weight.astype(np.float64)
    lost = np.abs(wide - integers * scale[..., None].astype(np.float64))
    whole = np.linalg.norm(wide)
    return (float(np.linalg.norm(lost) / whole) if whole else 0.0, float(lost.max()))


def is_matrix(name: str) -> bool:
    return name.endswith("_proj.weight")


def matrices(params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The matrices that become int8, by their paths in the model. Those of experts are stacked, in
    the order of their numbers."""
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, weight in params.items():
        layer, of_expert, rest = name.partition("experts.")
        if of_expert:
            number, kind = rest.split(".")[:2]
            experts.setdefault(layer + _EXPERTS[kind], {})[int(number)] = weight
        elif is_matrix(name):
            found[name] = weight
    if experts:  # upstream's Qwen3-MoE has another name for this one
        found = {name.replace("o_proj", "c_proj"): weight for name, weight in found.items()}
    stacks = {path: np.stack([its[i] for i in sorted(its)]) for path, its in experts.items()}
    return found | stacks


def expected_leaves(params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The leaves that an engine has for a checkpoint's matrices, by path."""
    found = {}
    for path, weight in matrices(params).items():
        integers, scale = quantize(weight)
        if weight.ndim == 3:
            found[path], found[f"{path}_scale"] = integers.swapaxes(1, 2), scale[:, None, None]
        else:
            found[f"{path}_q"], found[f"{path}_scale"] = integers, scale
    return found


def expected_fingerprint(pool: EnginePool, params: Mapping[str, np.ndarray]) -> str:
    """The fingerprint of these weights on an engine that does not quantize them."""
    specs = scheduler_of(pool, 0).leaves.source_specs
    own = own_layout(dict(params))
    arrays = {
        path: jax.device_put(own[path].astype(spec.dtype), spec.sharding)
        for path, spec in specs.items()
    }
    return fingerprints([arrays])[0]


def held(pool: EnginePool, index: int) -> dict[str, np.ndarray]:
    """An engine's integers and scales."""
    leaves = scheduler_of(pool, index).leaves
    return {
        path: np.asarray(leaves[path])
        for path in leaves
        if path.endswith("_scale") or leaves[path].dtype.itemsize == 1
    }


def has(pool: EnginePool, model: Path) -> None:
    """Every engine has NumPy's integers and scales of these weights, bit by bit."""
    holds(pool, tensors(model))


def holds(pool: EnginePool, params: Mapping[str, np.ndarray]) -> None:
    expected = expected_leaves(params)
    for index in range(len(pool.engines)):
        found = held(pool, index)
        assert found.keys() == expected.keys()
        for path, array in expected.items():
            np.testing.assert_array_equal(found[path], array, strict=True, err_msg=path)


def check_report(report: SwapReport, pool: EnginePool, params: Mapping[str, np.ndarray]) -> None:
    """The report names these weights, and the errors of their matrices by NumPy."""
    assert report.source == expected_fingerprint(pool, params)
    assert report.source != report.staged
    check_errors(report.to_dict()["quantized"], params)


def check_errors(found: Mapping[str, Any], params: Mapping[str, np.ndarray]) -> None:
    """These are the errors of every matrix, by NumPy."""
    expected = matrices(params)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        told = (found[path]["relative_error"], found[path]["largest_error"])
        np.testing.assert_allclose(told, errors(value), rtol=1e-4, err_msg=path)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8:
    """Replaces a matrix. Its product also quantizes the other factor."""

    integers: Any
    scale: Any

    @property
    def T(self) -> "Int8":
        return self

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        scale = jnp.abs(x).max(axis=-1, keepdims=True) / 127
        integers = jnp.rint(x / jnp.where(scale == 0, 1, scale))
        return integers @ self.integers.T.astype(np.float32) * scale * self.scale


@functools.partial(jax.jit, static_argnums=0)
def _logits(config: str, factors: dict[str, Any], ids: Any) -> jax.Array:
    """Compiled once for the weights of all checkpoints of a shape."""
    return families._logits(json.loads(config), factors, ids)


def serves_quantized(
    pool: EnginePool, model: Path, *, activations: bool = False, within: float = 1e-3
) -> None:
    """Every engine gives plain JAX's answers for the checkpoint's weights in int8."""
    config, params = read_checkpoint(model)
    factors: dict[str, Any] = {name: jnp.asarray(value) for name, value in params.items()}
    for name, weight in params.items():
        if is_matrix(name):
            integers, scale = quantize(weight)
            whole = integers.astype(np.float32) * scale[:, None]
            factors[name] = Int8(integers, scale) if activations else jnp.asarray(whole)
    logits = functools.partial(_logits, json.dumps(config), factors)
    assert pool.checksum()  # an error if the engines differ
    answered: set[int] = set()

    def all_have_answered() -> bool:
        for prompt, result in zip(PROMPTS, answers(pool), strict=True):
            ids = np.array([*prompt, *result["output_ids"]])
            assert len(ids) <= _LENGTH, json.dumps(ids.tolist())
            with jax.default_matmul_precision("highest"):
                rows = logits(np.pad(ids, (0, _LENGTH - len(ids))))
            rows = rows[len(prompt) - 1 : len(ids) - 1]
            told = np.array([each[0] for each in result["meta_info"]["output_token_logprobs"]])
            chosen = np.asarray(rows)[np.arange(len(rows)), ids[len(prompt) :]]
            np.testing.assert_allclose(
                told, chosen - jax.nn.logsumexp(rows, axis=-1), rtol=0, atol=within
            )
            np.testing.assert_allclose(chosen, np.asarray(rows).max(axis=1), rtol=0, atol=within)
            answered.add(result["meta_info"]["engine_index"])
        return len(answered) == len(pool.engines)

    until(all_have_answered)
