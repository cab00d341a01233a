"""Grammars of structured output: what a caller gives, and what it is compiled to."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from enginepool.errors import InvalidGrammar
from enginepool.values import described

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

KINDS = ("json_schema", "regex", "ebnf", "structural_tag")
# Characters of a grammar: what is longer takes seconds to compile.
_LONGEST = 1 << 18
# What a grammar may take: the stack that it is compiled on, smaller than that of any thread which
# compiles it or fills its masks in the pool's process; memory to compile it; and when it is.
STACK_BYTES = 1 << 21
ADDRESS_BYTES = 1 << 29
TOO_MUCH_MEMORY = f"it takes more than {ADDRESS_BYTES >> 20} MiB to compile; make it smaller"
MOST_BYTES = 1 << 27
# What its lexer grows by while its masks are computed, by the second of that, at the most.
_GROWTH = 1 << 28


class GrammarSource(NamedTuple):
    """What a request asks for: one of `KINDS`, and its text, JSON in one form."""

    kind: str
    text: str

    @classmethod
    def of(cls, kind: str, value: Any) -> GrammarSource:
        """
        Raises:
            InvalidGrammar: It is neither text nor, where the kind has one, an object.
        """
        if hasattr(value, "model_dump") and not isinstance(value, type):
            value = value.model_dump(by_alias=True, exclude_none=True)
        if kind in ("json_schema", "structural_tag"):
            text = _json(kind, value)
        elif isinstance(value, str):
            text = value
        else:
            raise InvalidGrammar(f"{kind}={described(value)}: expected a string")
        if len(text) > _LONGEST:
            raise InvalidGrammar(
                f"{kind} has {len(text)} characters: at most {_LONGEST} are compiled; shorten it"
            )
        return cls(kind, text)


def parser_limits() -> LLParserLimits:
    """llguidance's own, of which a grammar in use would reach half a gigabyte."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=100_000)


class Grammar:
    """A compiled grammar: from any thread.

    Attributes:
        seconds: What the masks of all its states have taken so far.
    """

    def __init__(self, start: LLMatcher, eos_token_id: int, compiled_bytes: int) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._compiled_bytes = compiled_bytes
        self.eos_token_id = eos_token_id
        self.seconds = 0.0

    @property
    def nbytes(self) -> int:
        """At the most: all its states share a lexer, which grows as they go on."""
        return self._compiled_bytes + int(_GROWTH * self.seconds)

    def matcher(self) -> LLMatcher:
        """A state of its own, before the first token."""
        with self._lock:
            return self._start.deep_copy()


def _json(kind: str, value: Any) -> str:
    try:
        if isinstance(value, str):
            value = json.loads(value)
        if not isinstance(value, dict):
            raise InvalidGrammar(
                f"{kind}={described(value)}: expected a JSON object, or one as text"
            )
        # In the order that it has: it is the order of an object's properties.
        return json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, InvalidGrammar):
            raise
        raise InvalidGrammar(f"{kind}={described(value)}: it is not JSON: {error}") from error
