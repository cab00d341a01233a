"""Random JSON schemas whose documents are all short."""

import random
from typing import Any

_NAMES = ["a", "id", "naïve", "two words", 'q"uote', "x_1", "Größe"]
# If any whitespace were allowed, a random model's answer might not end.
COMPACT = {"x-guidance": {"whitespace_flexible": False}}


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    return _schema(rng, depth) | COMPACT


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _integer, _pattern, _enum, _const, _boolean, _null]
    if depth:
        kinds += [_object, _object, _array, _any_of]
    return rng.choice(kinds)(rng, depth - 1)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    shortest = rng.randint(0, 3)
    return {"type": "string", "minLength": shortest, "maxLength": shortest + rng.randint(0, 4)}


def _pattern(rng: random.Random, depth: int) -> dict[str, Any]:
    patterns = ["^[a-c]{1,4}$", r"^\d{4}-\d{2}$", "^(yes|no)$", "^x?y{2}[^a-z]$"]
    return {"type": "string", "pattern": rng.choice(patterns)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "grün", 1, 2.5, None, True, ["a"], {"b": 1}], 3)}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice(["fixed", 7, False, None])}


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _null(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "null"}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(0, 3))
    return {
        "type": "object",
        "properties": {name: _schema(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    fewest = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _schema(rng, depth),
        "minItems": fewest,
        "maxItems": fewest + rng.randint(0, 1),
    }


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth) for _ in range(2)]}
