"""Grammars that end a process which compiles them, or hold it, or all of its memory."""

from __future__ import annotations

from typing import Any


def chain_of_schemas(count: int) -> dict[str, Any]:
    """Definitions, each of which is a list of the next."""
    chain = {
        f"d{i}": {"type": "array", "items": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]}}
        for i in range(count)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{count}": {"type": "integer"}}}


def chain_of_rules(count: int) -> str:
    """Rules, each of which is the next."""
    chain = "\n".join(f"r{i} ::= r{i + 1}" for i in range(count))
    return f'root ::= r0\n{chain}\nr{count} ::= "x"'


def without_end(count: int = 30) -> str:
    """0.8 KB of Lark whose automaton has two to the power of so many states."""
    return "start: X\nX: " + " & ".join(f"/(a|b)*a(a|b){{{i}}}.*/" for i in range(1, count + 1))


def lists(count: int) -> dict[str, Any]:
    """Lists of thousands of items each."""
    one = {"type": "array", "minItems": 9000, "items": {"type": "integer"}}
    return {"type": "object", "properties": {f"p{i}": one for i in range(count)}}


def multiples(count: int) -> dict[str, Any]:
    """Numbers of thousands of remainders each."""
    return {"anyOf": [{"type": "integer", "multipleOf": 9999 - i} for i in range(count)]}


def long_expression() -> str:
    """An expression for which the allowed tokens take the longer to find, the longer it is."""
    return "a" * 250_000
