"""Converters, which make leaves from tensors, and programs that run many of them at once.

A converter names no device. So equal layers share a program, and so do the engines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from enginepool.weights.arrays import outside_meshes

PROGRAMS = 256  # how many programs of a kind are kept; a model has a few for each kind of source


@dataclass(frozen=True)
class Converter:
    """Makes one leaf or several from their tensors. Two converters that do the same are equal.

    Attributes:
        steps: The operations, as text.
        shape: The leaf's shape, if `traced` made the converter; else None.
        does_nothing: Whether the leaf is its only tensor, unchanged.
        in_turn: Whether it waits for the converter before it in a program, because it needs much
            temporary memory.
        swaps: Whether the leaf is its only tensor with the last two axes exchanged. False if it is
            that tensor with its axes in order. Both may include one cast. None otherwise.
        stacks: As `swaps`, for a leaf that is the `stack` of several tensors.
        one_by_one: Whether it is called with functions that return the tensors. So it need not have
            all of them at once.
    """

    steps: str
    shape: Any
    does_nothing: bool
    _make: Callable[..., tuple[jax.Array, ...]] = field(compare=False, repr=False)
    in_turn: bool = False
    swaps: bool | None = None
    stacks: bool | None = None
    one_by_one: bool = False

    def __call__(self, *tensors: Any) -> tuple[jax.Array, ...]:
        return self._make(*tensors)


def traced(make: Callable[..., jax.Array], tensors: Sequence[Any]) -> Converter:
    """The converter that does what `make` does with such tensors. Raises what `make` raises."""
    program = jax.make_jaxpr(make)(*tensors)
    run = jaxpr_as_fun(program)
    (shape,) = (spec.shape for spec in program.out_avals)
    steps = f"{program} {program.consts}"
    make_all = lambda *arrays: tuple(run(*arrays))  # noqa: E731
    how = _swaps(program.jaxpr)
    swaps, stacks = (how, None) if len(tensors) == 1 else (None, how)
    return Converter(steps, shape, not program.eqns, make_all, swaps=swaps, stacks=stacks)


@jax.jit
def stack(*tensors: jax.Array) -> jax.Array:
    """Stack tensors along a new first axis. `_swaps` finds this step by its name."""
    return jnp.stack(tensors)


def _swaps(program: Any) -> bool | None:
    """See `Converter.swaps` and `Converter.stacks`."""
    (value, *more), eqns = program.invars, program.eqns
    if more:
        if not eqns or eqns[0].params.get("name") != "stack" or eqns[0].invars != program.invars:
            return None
        (value,), eqns = eqns[0].outvars, eqns[1:]
    unchanged = list(range(value.aval.ndim))
    order, casts = unchanged, 0
    for each in eqns:
        if each.invars != [value]:
            return None
        if each.primitive.name == "transpose":
            order = [order[axis] for axis in each.params["permutation"]]
        elif each.primitive.name == "convert_element_type" and not casts:
            casts = 1
        else:
            return None
        (value,) = each.outvars
    if program.outvars != [value]:
        return None
    return {(*unchanged,): False, (*unchanged[:-2], *unchanged[:-3:-1]): True}.get((*order,))


@functools.cache
def cast(dtype: Any) -> Converter:
    """The converter that casts a leaf's only tensor to this dtype."""
    make = lambda array: (array.astype(dtype),)  # noqa: E731
    return Converter(f"cast to {dtype}", None, False, make, swaps=False)


COPY = Converter("copy", None, False, lambda array: (jnp.copy(array),))


def convert(
    converters: Sequence[Converter],
    tensors: Sequence[Sequence[Any]],
    shardings: Sequence[Any],
) -> list[tuple[Any, ...]]:
    """Make leaves from their tensors, in one program. All tensors lie on the same devices. Each
    converter has one sharding, which all of its leaves get.

    For tensors that are `ShapeDtypeStruct` the program is only compiled. The leaves are
    `ShapeDtypeStruct` too.
    """
    if not converters:
        return []
    make, groups = program(tuple(converters), tuple(shardings)), [list(group) for group in tensors]
    with outside_meshes():
        if not any(isinstance(each, jax.ShapeDtypeStruct) for group in groups for each in group):
            return make(groups)
        lowered = make.lower(groups)
        lowered.compile()
    return [
        tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there) for leaf in made)
        for made, there in zip(lowered.out_info, shardings, strict=True)
    ]


@functools.lru_cache(maxsize=PROGRAMS)
def program(converters: tuple[Converter, ...], shardings: tuple[Any, ...]) -> Any:
    """The program that makes leaves from each list of tensors. See `convert`."""

    def convert_leaves(tensors: list[list[jax.Array]]) -> list[tuple[jax.Array, ...]]:
        return make_leaves(converters, tensors)

    return jax.jit(convert_leaves, out_shardings=list(shardings))


def make_leaves(
    converters: Sequence[Converter],
    groups: Sequence[Sequence[Any]],
    join: Callable[[Any], jax.Array] = lambda tensor: tensor,
) -> list[tuple[jax.Array, ...]]:
    """Make leaves inside a program, each from a group of tensors.

    Args:
        join: Called with each entry of a group when the converter needs it. Returns the tensor.
    """
    made: list[tuple[jax.Array, ...]] = []
    for make, group in zip(converters, groups, strict=True):
        if make.in_turn and made:
            group, made[-1] = jax.lax.optimization_barrier((group, made[-1]))
        tensors = [functools.partial(join, entry) for entry in group]
        made.append(make(*(tensors if make.one_by_one else [tensor() for tensor in tensors])))
    return made
