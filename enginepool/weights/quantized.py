"""Gives a model quantized layers, and quantizes its matrices while they are read (`quantizer.py`).

Reaches into upstream's quantization: `apply_linear_quantization` and `apply_moe_quantization` give
a model without values its quantized layers.

What breaks: Upstream loads a whole model in its own dtype before it quantizes it. So a chip cannot
open an 8B model for which it has room in int8. New weights cannot be quantized.
Why: Upstream quantizes once, after all matrices are loaded.
Remove when: Upstream quantizes each matrix when it is read, and takes arrays.

Block scales, and layers that upstream quantizes in another way, are not handled here. Upstream
opens such a model by itself, and the model takes no updates.

Imports sgl_jax: import it only after the patches are applied.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from sgl_jax.srt.utils.quantization import quantization_utils

from enginepool.errors import InvalidConfig
from enginepool.weights.quantizer import Quantizer
from enginepool.weights.sources import Specs

_SCALE = "_scale"
_TILE = 128  # of upstream's kernel for experts


class Quantization:
    """The quantizers of a model's matrices.

    Attributes:
        model_config: Upstream's configuration of the model before it was quantized.
        of: The quantizer of each matrix, by its path.
        errors: The errors of the matrices that were quantized while they were read, by path. See
            `rounding_error`.
    """

    def __init__(self, model_config: Any, before: Specs, quantizers: Sequence[Quantizer]) -> None:
        self.model_config = model_config
        self._before = {path: (each.shape, each.dtype) for path, each in before.items()}
        self.of = {each.path: each for each in quantizers}
        self.errors: dict[str, tuple[float, float]] = {}

    def specs(self, leaves: Specs) -> dict[str, jax.ShapeDtypeStruct]:
        """The specs of the model's leaves before it was quantized, in this engine's shardings.

        Args:
            leaves: The specs of the engine's leaves.
        """
        found = {}
        for path, (shape, dtype) in self._before.items():
            if (quantizer := self.of.get(path)) is not None:
                sharding = quantizer.turned_sharding(leaves[quantizer.leaves[0]].sharding)
                found[path] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            elif path in leaves:
                found[path] = leaves[path]
        return found


def quantize_model(model: nnx.Module, model_config: Any, mapped: Any) -> Quantization | None:
    """Give a model without values its quantized layers. Returns None, and leaves the model as it
    is, if it is not to be quantized while it is read.

    Args:
        mapped: Called with the specs of its leaves; returns the paths that a checkpoint's tensors
            make.

    Raises:
        InvalidConfig: Its experts are too narrow for upstream's kernel on this platform.
    """
    asked = getattr(model_config, "quantization_config", None)
    if asked is None or asked.is_static_checkpoint:
        return None
    before = specs_of(model)
    trial = nnx.clone(model)
    _apply(trial, model_config)
    quantizers = _quantizers(before, specs_of(trial), asked.get_moe_weight_dtype())
    if not quantizers or not {each.path for each in quantizers} <= mapped(before):
        return None
    _check_experts(quantizers, before)
    _apply(model, model_config)
    state = nnx.state(model)
    variables = _by_path(state)
    for each in quantizers:  # upstream keeps the dtype of experts until it has read them
        integers = variables[each.leaves[0]]
        spec = integers.get_value()
        integers.set_value(jax.ShapeDtypeStruct(spec.shape, each.to, sharding=spec.sharding))
    nnx.update(model, state)
    return Quantization(copy.copy(model_config), before, quantizers)


def _check_experts(quantizers: Sequence[Quantizer], before: Specs) -> None:
    """Except on a TPU, upstream's kernel reads beyond the scales of a narrow expert, where NaN may
    be."""
    if jax.default_backend() == "tpu":
        return
    for path in (each.path for each in quantizers if not each.turned):
        sharding: Any = before[path].sharding
        inputs = sharding.shard_shape(before[path].shape)[1]
        if inputs < _TILE:
            raise InvalidConfig(
                f"quantization_config_path: {path} has {inputs} inputs on each device; CPU and "
                f"GPU compute quantized experts of {_TILE} inputs or more"
            )


def mark_quantized(model_config: Any) -> None:
    """Keep upstream from quantizing matrices a second time."""
    asked = model_config.quantization_config
    model_config.quantization_config = replace(asked, is_static_checkpoint=True)


class Slot:
    """Replaces the Variable of a matrix while upstream reads it. A matrix that is assigned is
    quantized, and put into the Variables of its integers and its scales. `errors` gets its
    error."""

    def __init__(
        self,
        quantizer: Quantizer,
        integers: Any,
        scales: Any,
        errors: dict[str, tuple[float, float]],
    ) -> None:
        self._quantizer, self._errors = quantizer, errors
        self._integers, self._scales = integers, scales

    @property
    def value(self) -> Any:
        return jax.ShapeDtypeStruct(self._quantizer.shape, self._quantizer.dtype)

    @value.setter
    def value(self, matrix: jax.Array) -> None:
        there = self._scales.get_value().sharding
        integers, scales, error = self._quantizer.quantized(matrix, there)
        self._integers.set_value(integers)
        self._scales.set_value(scales)
        self._errors[self._quantizer.path] = error


def specs_of(model: nnx.Module) -> dict[str, Any]:
    """The values of a model's leaves, by path, in its order."""
    return {path: variable.get_value() for path, variable in _by_path(nnx.state(model)).items()}


def _by_path(state: Any) -> dict[str, Any]:
    return {".".join(map(str, path)): each for path, each in nnx.to_flat_state(state)}


def _apply(model: nnx.Module, model_config: Any) -> None:
    asked = model_config.quantization_config
    if asked.has_moe_quantization():
        quantization_utils.apply_moe_quantization(model_config, model, is_static_input=True)
    if asked.get_linear_rules():
        quantization_utils.apply_linear_quantization(model_config, model, is_static_input=True)


def _quantizers(before: Specs, after: Specs, experts: Any) -> list[Quantizer] | None:
    """The quantizers that turn the leaves before into those after, in the order of the model. None
    if a change is not known here."""
    found = {}
    for path in after.keys() - before.keys():
        if not path.endswith(_SCALE):
            continue
        stem = path.removesuffix(_SCALE)
        turned = f"{stem}_q" in after  # experts keep their name and their axes
        integers = f"{stem}_q" if turned else stem
        matrix, scales = before.get(stem), after[path]
        blocks = scales.ndim == 3 or (scales.ndim == 4 and scales.shape[1] > 1)
        if matrix is None or integers not in after or blocks:
            return None
        found[stem] = Quantizer(
            path=stem,
            leaves=(integers, path),
            shape=matrix.shape,
            dtype=matrix.dtype,
            to=np.dtype(after[integers].dtype if turned else experts),
            turned=turned,
            scales=scales.shape,
        )
    made = {leaf for each in found.values() for leaf in each.leaves}
    if after.keys() - made != before.keys() - found.keys():
        return None
    return [found[path] for path in before if path in found]
