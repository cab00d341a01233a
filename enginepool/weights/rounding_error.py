"""The error of a quantized matrix, computed by the program that quantizes it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from enginepool.weights.fingerprint import folded


class OutputErrors(NamedTuple):
    """The error of each output, in units of its scale.

    Attributes:
        norm: The squared norm of the output. NaN if the output has NaN or infinity.
        lost: The squared norm of its error.
        largest: The largest error of an element.
    """

    norm: jax.Array
    lost: jax.Array
    largest: jax.Array


def output_errors(exact: jax.Array, rest: jax.Array, axis: int) -> OutputErrors:
    """The error of each output of a matrix, or of a shard of it.

    Args:
        exact, rest: The matrix and its error, divided by the scales.
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
    return OutputErrors(*jax.lax.platform_dependent(*of, cpu=in_groups, default=at_once))


def rounding_error(errors: OutputErrors, scale: jax.Array) -> jax.Array:
    """The norm of a matrix's error relative to the norm of the matrix, and its largest error.

    Args:
        scale: The scale of each output.
    """
    # Scales are divided by the largest one, so that the square of an outlier is finite.
    top = scale.max()
    part = jnp.square(scale / jnp.where(top == 0, 1, top))
    whole = (errors.norm * part).sum()
    relative = jnp.sqrt((errors.lost * part).sum() / jnp.where(whole == 0, 1, whole))
    most = (errors.largest * scale).max()
    # XLA's maximum for CPU ignores NaN; a sum does not.
    return jnp.stack([relative, jnp.where(jnp.isnan(relative), jnp.nan, most)])


def _joined(one: Any, other: Any) -> tuple[Any, ...]:
    return one[0] + other[0], one[1] + other[1], jnp.maximum(one[2], other[2])
