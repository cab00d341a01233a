"""The error of a quantized matrix, computed by the program that quantizes it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginepool.weights.fingerprint import folded


def rounding_error(
    exact: jax.Array, rest: jax.Array, scale: jax.Array, axis: int
) -> tuple[jax.Array, jax.Array]:
    """The squared norm of each output, divided by its scale squared, and the error of the matrix:
    the norm of the error relative to the norm of the matrix, and the largest error.

    Args:
        exact, rest: The matrix and its error, divided by the scales.
        scale: The scale of each output.
        axis: The axis of the inputs: -1 or -2.
    """

    def at_once(*of: jax.Array) -> tuple[jax.Array, ...]:
        sums = (each.sum(axis=axis, keepdims=True) for each in of[:2])
        return *sums, of[2].max(axis=axis, keepdims=True)

    def in_groups(*of: jax.Array) -> tuple[jax.Array, ...]:
        """Reduce in two steps, so that XLA for CPU does not store all three arrays."""
        several = tuple(folded(each, axis) for each in of)
        zeros = (np.float32(0),) * 3
        some = jax.lax.reduce(several, zeros, _joined, (several[0].ndim + axis - 1,))
        return at_once(*jax.lax.optimization_barrier(some))

    of = jnp.square(exact), jnp.square(rest), jnp.abs(rest)
    norm, lost, largest = jax.lax.platform_dependent(*of, cpu=in_groups, default=at_once)
    # Scales are divided by the largest one, so that the square of an outlier is finite.
    top = scale.max()
    part = jnp.square(scale / jnp.where(top == 0, 1, top))
    whole = (norm * part).sum()
    relative = jnp.sqrt((lost * part).sum() / jnp.where(whole == 0, 1, whole))
    most = (largest * scale).max()
    # XLA's maximum for CPU ignores NaN; a sum does not.
    return norm, jnp.stack([relative, jnp.where(jnp.isnan(relative), jnp.nan, most)])


def _joined(one: Any, other: Any) -> tuple[Any, ...]:
    return one[0] + other[0], one[1] + other[1], jnp.maximum(one[2], other[2])
