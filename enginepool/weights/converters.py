"""What makes a leaf of its tensors, and the programs that do it for many leaves at once.

A converter names no device. So layers that are alike have the same programs, and engines too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Sharding

from enginepool.weights.arrays import outside_meshes

_PROGRAMS = 256  # of batches; a model has a few for each kind of source


@dataclass(frozen=True)
class Converter:
    """Makes a leaf of its tensors. Two that do the same are equal.

    Attributes:
        steps: What it does.
        shape: Of the leaf; None if it is the tensor's.
        does_nothing: Whether the leaf is its one tensor as it is.
    """

    steps: str
    shape: Any
    does_nothing: bool
    _make: Callable[..., jax.Array] = field(compare=False, repr=False)

    def __call__(self, *tensors: jax.Array) -> jax.Array:
        return self._make(*tensors)


def traced(make: Callable[..., jax.Array], tensors: Sequence[Any]) -> Converter:
    """What `make` does with tensors of these shapes and dtypes. Raises what it raises."""
    program = jax.make_jaxpr(make)(*tensors)
    run = jaxpr_as_fun(program)
    (shape,) = (spec.shape for spec in program.out_avals)
    steps = f"{program} {program.consts}"
    return Converter(steps, shape, not program.eqns, lambda *arrays: run(*arrays)[0])


@functools.cache
def cast(dtype: Any) -> Converter:
    """A leaf that is its one tensor, in this dtype."""
    return Converter(f"cast to {dtype}", None, False, lambda array: array.astype(dtype))


COPY = Converter("copy", None, False, jnp.copy)


def convert(
    converters: Sequence[Converter],
    tensors: Sequence[Sequence[jax.Array]],
    shardings: Sequence[Sharding],
) -> list[jax.Array]:
    """Make leaves of their tensors, in one program. All of them lie on the same devices."""
    if not converters:
        return []
    with outside_meshes():
        return program(tuple(converters), tuple(shardings))([list(group) for group in tensors])


@functools.lru_cache(maxsize=_PROGRAMS)
def program(converters: tuple[Converter, ...], shardings: tuple[Sharding, ...]) -> Any:
    """The program that makes these leaves, in these shardings, of a list of tensors for each."""

    def convert_leaves(tensors: list[list[jax.Array]]) -> list[jax.Array]:
        return [make(*group) for make, group in zip(converters, tensors, strict=True)]

    return jax.jit(convert_leaves, out_shardings=list(shardings))
