"""Quantizes one matrix: it becomes integers and scales, as upstream's `quantize_tensor` makes them.

Upstream divides by the scale. A compiler makes that a multiplication by the reciprocal in some
programs, and then other integers. Here it is always the multiplication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from enginepool.weights.converters import Converter, convert
from enginepool.weights.fingerprint import distinct_boxes, part_sums
from enginepool.weights.placement import first_of, place, place_all
from enginepool.weights.rounding_error import rounding_error


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

        There is a scale for each output.

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
