"""Grammars that end a process which compiles them or block it, and the words of their errors."""

import json
from typing import Any

from benchmarks.hostile_grammars import (
    chain_of_rules,
    chain_of_schemas,
    lists,
    long_expression,
    without_end,
)

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
