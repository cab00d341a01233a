"""Grammars that end a process which compiles them or block it, and the words of their errors."""

import json
from typing import Any


def chain_of_schemas(count: int) -> dict[str, Any]:
    """A chain of definitions. Each is a list of the next."""
    chain = {
        f"d{i}": {"type": "array", "items": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]}}
        for i in range(count)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{count}": {"type": "integer"}}}


def chain_of_rules(count: int) -> str:
    """A chain of rules. Each refers to the next."""
    chain = "\n".join(f"r{i} ::= r{i + 1}" for i in range(count))
    return f'root ::= r0\n{chain}\nr{count} ::= "x"'


def without_end(count: int = 30) -> str:
    """0.8 KB of Lark whose automaton has 2**count states."""
    return "start: X\nX: " + " & ".join(f"/(a|b)*a(a|b){{{i}}}.*/" for i in range(1, count + 1))


def lists(count: int) -> dict[str, Any]:
    """Lists of thousands of items each."""
    one = {"type": "array", "minItems": 9000, "items": {"type": "integer"}}
    return {"type": "object", "properties": {f"p{i}": one for i in range(count)}}


def multiples(count: int) -> dict[str, Any]:
    """Numbers of thousands of remainders each."""
    return {"anyOf": [{"type": "integer", "multipleOf": 9999 - i} for i in range(count)]}


def long_expression() -> str:
    """A long expression. The time to find the allowed tokens grows with its length."""
    return "a" * 250_000


HOSTILE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "schemas": ({"json_schema": chain_of_schemas(1400)}, ["chain of more than 256", "shorter"]),
    "rules": ({"ebnf": chain_of_rules(4000)}, ["stack of 2 MiB overflows", "shorter"]),
    "without end": ({"ebnf": without_end()}, ["more than", "to compile", "smaller"]),
    "lists": ({"json_schema": lists(200)}, ["minItems=9000", "at most 10000", "in all"]),
    "expression": (
        {"regex": long_expression()},
        ["ms to find the allowed tokens", "at most", "shorter"],
    ),
}


def form_of(params: dict[str, Any]) -> tuple[str, str]:
    """The grammar's kind and its text."""
    ((kind, value),) = params.items()
    return kind, value if isinstance(value, str) else json.dumps(value)
