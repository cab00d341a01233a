"""Finds the arrays that a compiled program reads in any case, whichever branches it takes."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import jax

# These operations pass an array on, or end a read that another operation has begun.
_PASSING = frozenset(
    (
        *("parameter", "tuple", "get-tuple-element", "bitcast", "optimization-barrier"),
        *("while", "call", "conditional", "copy-done", "slice-done", "async-update", "async-done"),
    )
)
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*-> .*\{")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")
_CALLED = re.compile(r"(?:body|condition|to_apply)=%?([\w.\-]+)")
_NAME = re.compile(r"%([\w.\-]+)")


class _Instruction(NamedTuple):
    name: str
    type: str
    opcode: str
    rest: str  # operands and attributes


def read_in_any_case(text: str, specs: Collection[jax.ShapeDtypeStruct]) -> int:
    """How many bytes of arrays like these, on one device, are read outside of all branches.

    Instructions of a branch run only if the branch is taken. If XLA begins to copy an array into
    faster memory before the branch, that copy runs in any case.

    Args:
        text: `jax.stages.Compiled.as_text()`.
    """
    sizes = {_type(spec): _nbytes(spec) for spec in specs}
    return sum(sizes[each] for each in _read(text, sizes))


def _read(text: str, types: Collection[str]) -> Iterator[str]:
    """The types of the arrays that are read, each array once for each computation."""
    computations, entry = _computations(text)
    seen, todo = set[str](), [entry]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        instructions = computations[name]
        found = {each.name: each.type.partition("{")[0] for each in instructions}
        read = set[str]()
        for each in instructions:
            if each.opcode in ("while", "call"):
                todo += _CALLED.findall(each.rest)
            if each.opcode not in _PASSING:
                operands, _, _ = each.rest.partition(")")
                read |= {one for one in _NAME.findall(operands) if found.get(one) in types}
        yield from (found[one] for one in read)


def _computations(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """The instructions of each computation, and the name of the first one that runs."""
    computations: dict[str, list[_Instruction]] = {}
    entry, current = "", list[_Instruction]()
    for line in text.splitlines():
        if (head := _COMPUTATION.match(line)) is not None:
            current = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        elif (found := _INSTRUCTION.match(line)) is not None:
            current.append(_Instruction(*found.groups()))
    return computations, entry


def _type(spec: jax.ShapeDtypeStruct) -> str:
    names = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}
    return f"{names[spec.dtype.name]}[{','.join(map(str, _shard(spec)))}]"


def _nbytes(spec: jax.ShapeDtypeStruct) -> int:
    return math.prod(_shard(spec)) * spec.dtype.itemsize


def _shard(spec: Any) -> tuple[int, ...]:
    return spec.shape if spec.sharding is None else spec.sharding.shard_shape(spec.shape)
