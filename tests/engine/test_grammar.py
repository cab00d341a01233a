"""What a request's grammar tells upstream, tested without an engine."""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from enginepool import toy
from enginepool.dispatch.grammar import Grammar
from enginepool.engine.grammar import RequestGrammar
from enginepool.engine.running import finish_reason
from enginepool.toy.files import END_ID

SIZE = 272


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    text = (toy.checkpoint() / "tokenizer.json").read_text(encoding="utf-8")
    return LLTokenizer(text, n_vocab=SIZE, eos_token=END_ID)


def compiled(
    vocabulary: LLTokenizer, kind: Any, text: str, limits: LLParserLimits | None = None
) -> Grammar:
    matcher = LLMatcher(vocabulary, grammar_from(kind, text), limits=limits)
    assert not matcher.is_error()
    return Grammar(matcher, END_ID, 0)


def allowed(grammar: RequestGrammar, rows: int = 3, row: int = 1) -> set[int]:
    mask = grammar.allocate_vocab_mask(SIZE, rows)
    grammar.fill_vocab_mask(mask, row)
    assert mask.shape == (rows, 9)
    assert mask.dtype == np.int32
    assert (np.delete(mask, row, axis=0) == -1).all()  # the other rows may sample anything
    bits = np.unpackbits(mask[row].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_allowed_tokens_are_a_function_of_the_output(vocabulary: LLTokenizer) -> None:
    """It does not matter whether tokens came one by one, or were there when the engine got the
    request."""
    grammar = compiled(vocabulary, "json_schema", json.dumps({"enum": [12, 13, 'a"é']}))
    output = list(b'"a\\"\xc3\xa9"')
    going = RequestGrammar(grammar, [], [])
    other = RequestGrammar(grammar, [], [])
    for place, token in enumerate(output):
        resumed = RequestGrammar(grammar, [], output[:place])
        assert token in allowed(going) == allowed(resumed)
        going.accept_token(token)
    assert allowed(going) == {END_ID}
    assert allowed(other) == {ord('"'), ord("1")}  # it shares no state with them


@pytest.mark.parametrize("ends", [[], [END_ID], [END_ID, 256, 257], [END_ID, 10_000], [256]])
def test_any_end_of_the_models_where_one_is_allowed(
    vocabulary: LLTokenizer, ends: Sequence[int]
) -> None:
    """If an end is allowed, all end tokens of the model are. In the middle none is. The id that
    llguidance uses as end is allowed only if it is one of the model's."""
    grammar = RequestGrammar(compiled(vocabulary, "regex", "[ab]{2,3}"), ends, [])
    assert allowed(grammar) == {97, 98}
    grammar.accept_token(97)
    grammar.accept_token(98)
    known = ({*ends} or {END_ID}) - {10_000}
    assert allowed(grammar) == {97, 98} | known
    grammar.accept_token(max(known))
    assert grammar.failure is None


def test_a_grammar_that_can_go_no_further(vocabulary: LLTokenizer) -> None:
    """llguidance has limits. Then only the end token is left to sample, and the request says why
    it ended. Other requests of the same grammar continue."""
    limits = LLParserLimits(step_max_items=30)
    limited = compiled(vocabulary, "ebnf", 'root ::= root root | "a" | "b" root', limits)
    ends = [256, END_ID]
    grammar, other = RequestGrammar(limited, ends, []), RequestGrammar(limited, ends, [])
    for _ in range(100):
        if grammar.failure is not None:
            break
        grammar.accept_token(97)
        allowed(grammar)
    assert grammar.failure
    assert allowed(grammar) == {256, END_ID}
    grammar.accept_token(97)
    assert allowed(grammar) == {256, END_ID}
    assert allowed(other) == {97, 98}

    req = SimpleNamespace(grammar=grammar)
    stop = {"type": "stop", "matched": END_ID}
    ended = finish_reason(req, stop)
    assert (ended["type"], ended["err_type"]) == ("abort", "grammar")
    assert grammar.failure in ended["message"]
    assert finish_reason(req, {"type": "length", "length": 3})["type"] == "length"
    req.grammar = other
    assert finish_reason(req, stop) == stop


def test_a_grammar_that_takes_too_long(vocabulary: LLTokenizer) -> None:
    """Other requests wait for its masks. So a request may use a limited time and then ends.
    Another request of the same grammar has its own time."""
    slow = compiled(vocabulary, "regex", "a" * 250_000)
    grammar, other = RequestGrammar(slow, [], []), RequestGrammar(slow, [], [])
    for _ in range(1000):
        allowed(grammar)
        if grammar.failure is not None:
            break
        grammar.accept_token(ord("a"))
    assert "takes too long" in (grammar.failure or "")
    assert slow.seconds > 0.5
    assert slow.nbytes > 100 << 20
    assert allowed(grammar) == {END_ID}
    assert ord("a") in allowed(other)

    quick = RequestGrammar(compiled(vocabulary, "regex", "[ab]{2000}"), [], [])
    for _ in range(2000):
        assert allowed(quick) == {97, 98}
        quick.accept_token(97)
    assert allowed(quick) == {END_ID}
