"""Quantizes one matrix: it becomes integers and scales, as upstream's `quantize_tensor` makes them.

Upstream divides by the scale. In some programs the compiler multiplies by the reciprocal instead,
which makes other integers. Here every program multiplies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from enginepool.weights.converters import Converter, convert
from enginepool.weights.fingerprint import distinct_boxes, part_sums, part_sums_in_stack
from enginepool.weights.placement import first_of, place, place_all
from enginepool.weights.rounding_error import OutputErrors, output_errors, rounding_error


@dataclass(frozen=True)
class Quantizer:
    """Quantizes one matrix, or one stack of experts.

    Attributes:
        path: The path of the matrix before the model is quantized.
        leaves: The paths of its integers and of its scales in the quantized model.
        shape, dtype: The matrix has these.
        to: The dtype of the integers.
        turned: Whether the integers are transposed.
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
        """Quantize the matrix that `make` makes of these tensors, with a scale for each output.

        Returns the integers, the scales, and the error as `rounding_error` returns it.

        Args:
            axis: The axis of the inputs in the matrix: -2 as in the model, or -1.
        """
        return self.finished(*self._unfinished(make, tensors, axis), axis)

    def _unfinished(
        self, make: Any, tensors: Any, axis: int
    ) -> tuple[jax.Array, jax.Array, OutputErrors]:
        """The integers, the scales and the errors, as `finished` takes them."""
        if self.dtype != np.float32 and any(each.dtype != self.dtype for each in tensors):
            # The barrier keeps the compiler from leaving out the cast to the matrix's dtype.
            tensors, make = (jax.lax.optimization_barrier(make(*tensors)),), lambda made: made
        wide = lambda *tensors: make(*tensors).astype(jnp.float32)  # noqa: E731
        scale = self.scale(jnp.abs(wide(*tensors)).max(axis=axis, keepdims=True))
        integers, errors = self.rounded(wide, tensors, scale, axis)
        return integers, scale, errors

    def scale(self, largest: jax.Array) -> jax.Array:
        """The scale of outputs whose largest elements, without their signs, are these."""
        most = jnp.iinfo(self.to).max if self._rounds else float(jnp.finfo(self.to).max)
        scale = largest * np.float32(1 / np.float32(most))
        # Processors differ in whether a subnormal number is zero. Its reciprocal may be infinite.
        return jnp.where(scale < jnp.finfo(jnp.float32).tiny, 0, scale)

    def rounded(
        self, make_wide: Callable[..., jax.Array], tensors: Any, scale: jax.Array, axis: int
    ) -> tuple[jax.Array, OutputErrors]:
        """The integers, not transposed, and the errors of a matrix or of a shard.

        Args:
            make_wide: Makes it of these tensors, in float32.
        """
        inverse = 1 / jnp.where(scale == 0, 1, scale)
        # XLA for CPU would store the matrix in float32 for its several uses. To make it again for
        # each use is cheaper. The barriers make each use a computation of its own.
        tensors, inverse = jax.lax.optimization_barrier((tensors, inverse))
        integers = self._nearest(make_wide(*tensors) * inverse).astype(self.to)
        tensors, inverse = jax.lax.optimization_barrier((tensors, inverse))
        exact = make_wide(*tensors) * inverse
        return integers, output_errors(exact, exact - self._nearest(exact), axis)

    def finished(
        self, integers: jax.Array, scale: jax.Array, errors: OutputErrors, axis: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The integers and the scales as the model has them, and the `rounding_error`."""
        error = rounding_error(errors, scale)
        # XLA's maximum ignores NaN on a CPU. The scale of an output with NaN or infinity is NaN.
        scale = jnp.where(jnp.isnan(errors.norm), jnp.nan, scale)
        if (axis == -1) != self.turned:
            integers = _transposed(integers)
        return integers, scale.reshape(self.scales), error

    def _nearest(self, exact: jax.Array) -> jax.Array:
        """The nearest numbers that the dtype of the integers has."""
        if self._rounds:
            return jnp.round(exact)
        return exact.astype(self.to).astype(jnp.float32)

    @property
    def _rounds(self) -> bool:
        """Whether the dtype has integers only, so that values are rounded before the cast."""
        return jnp.issubdtype(self.to, jnp.integer)

    def after(self, converter: Converter, sharding: Sharding, *, transposes: bool) -> Converter:
        """The converter that makes the matrix and quantizes it. It makes integers, scales, the
        error, and `part_sums` of the matrix.

        Args:
            sharding: The sharding of the matrix before the model is quantized.
            transposes: Whether the converter transposes. If so, its result is transposed back, and
                the compiler drops both.
        """
        parts = distinct_boxes(self.shape, sharding)
        steps = f"{converter.steps}, quantized: {self.to} {self.turned} {self.scales} {parts}"
        if converter.stacks is not None:
            one_by_one = functools.partial(self._one_by_one, sharding, converter.stacks)
            return Converter(steps, None, False, one_by_one, in_turn=True, one_by_one=True)
        axis = -1 if transposes else -2

        def make(*tensors: jax.Array) -> jax.Array:
            (matrix,) = converter(*tensors)
            return matrix.swapaxes(-1, -2) if transposes else matrix

        def make_all(*tensors: jax.Array) -> tuple[jax.Array, ...]:
            matrix = make(*jax.lax.optimization_barrier(tensors))
            return *self(make, tensors, axis), part_sums(matrix, sharding, turned=transposes)

        return Converter(f"{steps} {transposes}", None, False, make_all, in_turn=True)

    def _one_by_one(
        self, sharding: Sharding, swapped: bool, *tensors: Callable[[], jax.Array]
    ) -> tuple[jax.Array, ...]:
        """What the converter of `after` makes, for a stack of experts. A loop quantizes one after
        the other, so that the stack exists in integers only, and one expert is compiled for all.

        Args:
            swapped: Whether the tensors have their axes exchanged.
        """
        axis = -1 if swapped else -2
        experts = [lambda tensor=tensor: tensor().astype(self.dtype) for tensor in tensors]

        def quantize(index: jax.Array) -> tuple[Any, ...]:
            # The barrier keeps the compiler from leaving out the cast to the matrix's dtype.
            expert = jax.lax.optimization_barrier(jax.lax.switch(index, experts))
            integers, scale, errors = self._unfinished(lambda own: own, (expert,), axis)
            integers = _transposed(integers) if swapped else integers
            sums = part_sums_in_stack(expert, index, len(experts), sharding, turned=swapped)
            return integers, scale, errors, sums

        integers, scale, errors, sums = jax.lax.map(quantize, jnp.arange(len(experts)))
        sums = jnp.sum(sums, axis=0, dtype=jnp.uint32)
        return *self.finished(integers, scale, errors, -2), sums

    def quantized(
        self, matrix: jax.Array, scales: Any
    ) -> tuple[jax.Array, jax.Array, tuple[float, float]]:
        """Quantize a matrix that lies on an engine's devices, on the first of them.

        Returns the integers, the scales, and the error as `rounding_error` returns it.
        """
        sharding: Any = matrix.sharding
        first = first_of(sharding)
        steps = f"quantized: {self.dtype} {self.to} {self.turned} {self.scales}"
        make = lambda tensor: tensor.astype(self.dtype)  # noqa: E731
        only = Converter(steps, None, False, lambda *tensors: self(make, tensors, -2))
        ((*made, error),) = convert([only], [[place(matrix, first, matrix.dtype)]], [first])
        there = [self.turned_sharding(sharding), NamedSharding(sharding.mesh, scales.spec)]
        placed = place_all(made, there, [each.dtype for each in made])
        # Wait here, so that the next matrices do not fill the device before this one is quantized.
        integers, scale = jax.block_until_ready(placed)
        relative, largest = np.asarray(error).tolist()
        return integers, scale, (relative, largest)

    def turned_sharding(self, sharding: Any) -> Any:
        """The sharding of the integers for that of the matrix, or the reverse."""
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


def _transposed(integers: jax.Array) -> jax.Array:
    """Integers with their last two axes exchanged.

    Both sides are stored in the order of their axes. Otherwise XLA for CPU rounds, or copies, in
    the order of the other side, which takes several times as long.
    """
    order = Layout(tuple(range(integers.ndim)))
    stored = with_layout_constraint(integers, order)
    return with_layout_constraint(stored.swapaxes(-1, -2), order)
