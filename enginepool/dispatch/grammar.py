"""Grammars of structured output: the caller's text, and the compiled grammar."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from enginepool.errors import InvalidGrammar
from enginepool.values import described

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

KINDS = ("json_schema", "regex", "ebnf", "structural_tag")
# The most characters of a grammar. A longer one takes seconds to compile.
_LONGEST = 1 << 18
# The limits of a grammar: the stack of the thread that compiles it, its memory during compilation,
# and its memory afterwards. Threads of the pool's process have larger stacks than this.
STACK_BYTES = 1 << 21
ADDRESS_BYTES = 1 << 29
TOO_MUCH_MEMORY = f"it takes more than {ADDRESS_BYTES >> 20} MiB to compile; make it smaller"
MOST_BYTES = 1 << 27
# An upper bound of the lexer's growth, in bytes per second of computing masks.
_GROWTH = 1 << 28


class GrammarSource(NamedTuple):
    """A grammar as a request gives it: one of `KINDS`, and its text. JSON text is normalized."""

    kind: str
    text: str

    @classmethod
    def of(cls, kind: str, value: Any) -> GrammarSource:
        """Check and normalize the value of a request's parameter `kind`.

        Raises:
            InvalidGrammar: The value is neither text nor, for a kind that allows one, an object. Or
                it is not JSON, or too long.
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
    """Limits for llguidance. With its defaults a grammar in use can reach half a gigabyte."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=100_000)


class Grammar:
    """A compiled grammar. Thread-safe.

    Attributes:
        seconds: How long the masks of all its states have taken to compute so far.
    """

    def __init__(self, start: LLMatcher, eos_token_id: int, compiled_bytes: int) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._compiled_bytes = compiled_bytes
        self.eos_token_id = eos_token_id
        self.seconds = 0.0

    @property
    def nbytes(self) -> int:
        """An upper bound of its bytes. All states share one lexer, which grows while they
        advance."""
        return self._compiled_bytes + int(_GROWTH * self.seconds)

    def matcher(self) -> LLMatcher:
        """A new state, before the first token."""
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
        # Keys keep their order, which is the order of an object's properties.
        return json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, InvalidGrammar):
            raise
        raise InvalidGrammar(f"{kind}={described(value)}: it is not JSON: {error}") from error
