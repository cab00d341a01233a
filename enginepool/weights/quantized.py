"""Quantizes a source's matrices: each becomes integers and scales.

Reaches into upstream's quantization: `apply_linear_quantization` and `apply_moe_quantization` give
a model without values its quantized layers.

What breaks: Upstream loads a whole model in its own dtype before it quantizes it. So a chip cannot
open an 8B model for which it has room in int8. New weights cannot be quantized.
Why: Upstream quantizes once, after all matrices are loaded.
Remove when: Upstream quantizes each matrix when it is read, and takes arrays.

Scales of blocks, and layers that upstream quantizes in another way, stay upstream's: such a model
opens as upstream opens it, and takes no updates.

Imports sgl_jax: import it only after the patches are applied.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from sgl_jax.srt.utils.quantization import quantization_utils

from enginepool.errors import InvalidConfig
from enginepool.weights.converters import Converter, convert
from enginepool.weights.fingerprint import distinct_boxes, part_sums
from enginepool.weights.placement import first_of, place, place_all
from enginepool.weights.rounding_error import rounding_error
from enginepool.weights.sources import Specs

_SCALE = "_scale"
_TILE = 128  # of upstream's kernel for experts


@dataclass(frozen=True)
class Quantizer:
    """Quantizes one matrix, or one stack of experts.

    Attributes:
        path: Its path in the model that is not quantized.
        leaves: The paths of its integers and of its scales in the quantized model.
        shape, dtype: Those of the matrix.
        to: The dtype of the integers.
        turned: Whether the integers have rows and columns exchanged.
        scales: The shape of the scales.
    """

    path: str
    leaves: tuple[str, str]
    shape: tuple[int, ...]
    dtype: Any
    to: Any
    turned: bool
    scales: tuple[int, ...]

    def __call__(
        self, make: Any, tensors: Any, axis: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Integers and scales of the matrix that `make` makes of these tensors; and the error: its
        norm as a part of the matrix's, and the largest.

        A scale for each output: that of upstream's `quantize_tensor`. It divides, which a compiler
        makes a multiplication by the reciprocal in some programs, and then other integers.

        Args:
            axis: The inputs in what `make` makes: -2 as in the model, or -1.
        """
        most = jnp.iinfo(self.to).max if self._rounds else float(jnp.finfo(self.to).max)
        if self.dtype != np.float32 and any(each.dtype != self.dtype for each in tensors):
            # Made once. A compiler may leave out a cast to the matrix's dtype and back, but not
            # across a barrier.
            tensors, make = (jax.lax.optimization_barrier(make(*tensors)),), lambda made: made
        wide = lambda *tensors: make(*tensors).astype(jnp.float32)  # noqa: E731
        scale = jnp.abs(wide(*tensors)).max(axis=axis, keepdims=True)
        scale = scale * np.float32(1 / np.float32(most))
        inverse = 1 / jnp.where(scale == 0, 1, scale)
        # XLA for CPU keeps what several uses have in common, here a copy of the matrix in float32.
        # That costs more than it saves, so each use has tensors of its own.
        tensors, inverse = jax.lax.optimization_barrier((tensors, inverse))
        integers = self._nearest(wide(*tensors) * inverse).astype(self.to)
        tensors, inverse = jax.lax.optimization_barrier((tensors, inverse))
        exact = wide(*tensors) * inverse
        norm, error = rounding_error(exact, exact - self._nearest(exact), scale, axis)
        # XLA's maximum leaves out NaN on a CPU. An output that has NaN or infinity is NaN.
        scale = jnp.where(jnp.isnan(norm), jnp.nan, scale)
        if (axis == -1) != self.turned:
            integers = integers.swapaxes(-1, -2)
        return integers, scale.reshape(self.scales), error

    def _nearest(self, exact: jax.Array) -> jax.Array:
        """The nearest numbers that the dtype of the integers has."""
        if self._rounds:
            return jnp.round(exact)
        return exact.astype(self.to).astype(jnp.float32)

    @property
    def _rounds(self) -> bool:
        """Whether a cast drops a fraction."""
        return jnp.issubdtype(self.to, jnp.integer)

    def after(self, converter: Converter, sharding: Sharding, *, turned: bool) -> Converter:
        """The converter that makes the matrix and quantizes it. It makes integers, scales, the
        error, and `part_sums` of the matrix.

        Args:
            sharding: That of the matrix in a model that is not quantized.
            turned: Whether the converter exchanges rows and columns. They are exchanged back then,
                so that nothing is.
        """
        axis = -1 if turned else -2

        def make(*tensors: jax.Array) -> jax.Array:
            (matrix,) = converter(*tensors)
            return matrix.swapaxes(-1, -2) if turned else matrix

        def make_all(*tensors: jax.Array) -> tuple[jax.Array, ...]:
            matrix = make(*jax.lax.optimization_barrier(tensors))
            return *self(make, tensors, axis), part_sums(matrix, sharding, turned=turned)

        parts = distinct_boxes(self.shape, sharding)
        steps = f"{converter.steps}, quantized: {self.to} {self.turned} {self.scales} {parts}"
        return Converter(f"{steps} {turned}", None, False, make_all)

    def quantized(self, matrix: jax.Array, scales: Any) -> tuple[jax.Array, jax.Array]:
        """Quantize a matrix that lies on an engine's devices, on the first of them."""
        sharding: Any = matrix.sharding
        first = first_of(sharding)
        steps = f"quantized: {self.dtype} {self.to} {self.turned} {self.scales}"
        make = lambda tensor: tensor.astype(self.dtype)  # noqa: E731
        only = Converter(steps, None, False, lambda *tensors: self(make, tensors, -2)[:2])
        (made,) = convert([only], [[place(matrix, first, matrix.dtype)]], [first])
        there = [self.around(sharding), NamedSharding(sharding.mesh, scales.spec)]
        integers, scale = place_all(made, there, [each.dtype for each in made])
        # So that matrices do not wait on the device until they are quantized.
        return jax.block_until_ready((integers, scale))

    def around(self, sharding: Any) -> Any:
        """The sharding of the integers, from that of the matrix, or the other way round."""
        if not self.turned:
            return sharding
        axes = (*sharding.spec, None, None)[:2]
        return NamedSharding(sharding.mesh, PartitionSpec(*axes[::-1]))

    def matrix(self, leaves: Mapping[str, Any]) -> np.ndarray:
        """The matrix that these integers and scales stand for, in float32."""
        integers, scales = (np.asarray(leaves[path]) for path in self.leaves)
        integers = integers.astype(np.float32)
        if self.turned:
            return (integers * scales[:, None]).T
        return integers * scales.reshape(scales.shape[0], 1, -1)


class Quantization:
    """The quantizers of a model's matrices.

    Attributes:
        model_config: Upstream's, as it is for the model that is not quantized.
        of: The quantizers, by the path of the matrix.
    """

    def __init__(self, model_config: Any, before: Specs, quantizers: Sequence[Quantizer]) -> None:
        self.model_config = model_config
        self._before = {path: (each.shape, each.dtype) for path, each in before.items()}
        self.of = {each.path: each for each in quantizers}

    def specs(self, leaves: Specs) -> dict[str, jax.ShapeDtypeStruct]:
        """The leaves of the model that is not quantized, where this engine would have them.

        Args:
            leaves: Those that the engine has.
        """
        found = {}
        for path, (shape, dtype) in self._before.items():
            if (quantizer := self.of.get(path)) is not None:
                sharding = quantizer.around(leaves[quantizer.leaves[0]].sharding)
                found[path] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            elif path in leaves:
                found[path] = leaves[path]
        return found


def quantize_model(model: nnx.Module, model_config: Any, mapped: Any) -> Quantization | None:
    """Give a model without values its quantized layers. None if it is not to be quantized while it
    is read; the model is then as it was.

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
    """Off a TPU, upstream's kernel reads scales beside a narrow expert's, which may be NaN."""
    if jax.default_backend() == "tpu":
        return
    for path in (each.path for each in quantizers if not each.turned):
        sharding: Any = before[path].sharding
        inputs = sharding.shard_shape(before[path].shape)[1]
        if inputs < _TILE:
            raise InvalidConfig(
                f"quantization_config_path: {path} has {inputs} inputs on each device; CPU and "
                f"GPU compute quantized experts of {_TILE} or more"
            )


def mark_quantized(model_config: Any) -> None:
    """Keep upstream from quantizing matrices a second time."""
    asked = model_config.quantization_config
    model_config.quantization_config = replace(asked, is_static_checkpoint=True)


class Slot:
    """Replaces the Variable of a matrix while upstream reads it. A matrix that is assigned is
    quantized, and put into the Variables of its integers and its scales."""

    def __init__(self, quantizer: Quantizer, integers: Any, scales: Any) -> None:
        self._quantizer = quantizer
        self._integers, self._scales = integers, scales

    @property
    def value(self) -> Any:
        return jax.ShapeDtypeStruct(self._quantizer.shape, self._quantizer.dtype)

    @value.setter
    def value(self, matrix: jax.Array) -> None:
        there = self._scales.get_value().sharding
        integers, scales = self._quantizer.quantized(matrix, there)
        self._integers.set_value(integers)
        self._scales.set_value(scales)


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
    """The quantizers between these leaves, in the order of the model. None if some are unknown."""
    found = {}
    for path in after.keys() - before.keys():
        if not path.endswith(_SCALE):
            continue
        stem = path.removesuffix(_SCALE)
        turned = f"{stem}_q" in after  # experts keep their name, and are not turned
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
