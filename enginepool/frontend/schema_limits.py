"""Finds JSON schemas that would take minutes or gigabytes to compile, before compilation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

# llguidance expands every item, every remainder of `multipleOf`, and every combination of `allOf`.
# It compiles nested schemas and references recursively, on the stack.
_MOST_ITEMS = 10_000
_LARGEST_MULTIPLE = 10_000
_MOST_WAYS = 1_000
_LONGEST_CHAIN = 256


def check_schema(schema: Any) -> None:
    """
    Raises:
        ValueError: The schema is too large. The error names the keyword, its value and the limit.
        RecursionError: The schema is nested too deeply.
    """
    parts = dict(_subschemas(schema, "#"))
    items = 0.0
    for part in parts.values():
        for names in (("minItems", "maxItems"), ("minProperties", "maxProperties")):
            counts = [(part[name], name) for name in names if _is_count(part.get(name))]
            count, name = max(counts, default=(0, ""))
            items += count
            if items > _MOST_ITEMS:
                raise ValueError(
                    f"{name}={count}: a schema may have at most {_MOST_ITEMS} in all; lower it"
                )
        _check_multiple(part.get("multipleOf"))
    _check_chains(schema, parts)
    _Ways(parts).check()


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _check_chains(schema: Any, parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Check the length of chains of nested schemas and references.

    Each schema is visited once, as in the compiler.
    """
    seen: set[int] = set()
    ways: list[Iterator[Any]] = [iter([schema])]
    while ways:
        value = next(ways[-1], ways)
        if value is ways:
            ways.pop()
        elif isinstance(value, Mapping | list) and id(value) not in seen:
            seen.add(id(value))
            if len(ways) > _LONGEST_CHAIN:
                raise ValueError(
                    f"it has a chain of more than {_LONGEST_CHAIN} nested or referenced schemas "
                    "($ref, anyOf, items, …): make it shorter"
                )
            ways.append(iter(_next_in_chain(value, parts)))


def _next_in_chain(value: Any, parts: Mapping[str, Any]) -> list[Any]:
    """The schemas inside a schema and the one that it refers to. Definitions count only if referred
    to."""
    if isinstance(value, list):
        return value
    inner = [one for name, one in value.items() if name not in ("$defs", "definitions")]
    reference = value.get("$ref")
    if isinstance(reference, str) and reference in parts:
        inner.append(parts[reference])
    return inner


def _check_multiple(number: Any) -> None:
    if not isinstance(number, int | float):
        return
    digits = Fraction(str(number))  # 0.05 counts as 5 (hundredths)
    if digits.numerator * (_decimals(digits) // digits.denominator) > _LARGEST_MULTIPLE:
        raise ValueError(
            f"multipleOf={number}: without its decimal point it may be at most {_LARGEST_MULTIPLE}"
        )


def _decimals(number: Fraction) -> int:
    """The least power of ten whose product with the number is an integer."""
    power = 1
    while power % number.denominator:
        power *= 10
    return power


class _Ways:
    """Counts the alternatives of an `allOf`: the product over its parts, at any depth."""

    def __init__(self, parts: Mapping[str, Mapping[str, Any]]) -> None:
        self._parts = parts
        self._known: dict[int, int] = {}

    def check(self) -> None:
        for place, part in self._parts.items():
            if isinstance(part.get("allOf"), list) and (ways := self._of(part)) > _MOST_WAYS:
                raise ValueError(
                    f"{place}: the alternatives of the parts of allOf multiply to {ways}: at most "
                    f"{_MOST_WAYS}; use fewer"
                )

    def _of(self, part: Mapping[str, Any]) -> int:
        ways = 1
        for name in ("anyOf", "oneOf"):
            if isinstance(part.get(name), list):
                ways *= max(1, len(part[name]))
        if isinstance(members := part.get("allOf"), list):
            for member in members:
                ways = min(ways * self._most_in(member), 10 * _MOST_WAYS)
        if isinstance(reference := part.get("$ref"), str):
            ways *= self._most_in(self._parts.get(reference))
        return min(ways, 10 * _MOST_WAYS)

    def _most_in(self, value: Any) -> int:
        """The most alternatives of any part inside, references included."""
        if isinstance(value, list):
            return max(map(self._most_in, value), default=1)
        if not isinstance(value, Mapping):
            return 1
        if id(value) not in self._known:
            self._known[id(value)] = 1  # ends a reference to itself
            inner = max(map(self._most_in, value.values()), default=1)
            self._known[id(value)] = max(self._of(value), inner)
        return self._known[id(value)]


def _subschemas(schema: Any, place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every object in a schema, by its JSON pointer."""
    if isinstance(schema, Mapping):
        yield place, schema
        for name, value in schema.items():
            escaped = str(name).replace("~", "~0").replace("/", "~1")
            yield from _subschemas(value, f"{place}/{escaped}")
    elif isinstance(schema, list):
        for index, value in enumerate(schema):
            yield from _subschemas(value, f"{place}/{index}")
