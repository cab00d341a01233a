"""Grammars are compiled once a pool, with llguidance, on the thread that brings them."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from enginepool.errors import InvalidGrammar
from enginepool.requests.grammar import Grammar, GrammarSource
from enginepool.requests.schema_limits import check_schema
from enginepool.requests.structural_tag import structural_tag_grammar
from enginepool.requests.tokenizer import Tokenizer
from enginepool.values import described

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_KEPT = 128


class GrammarCompiler:
    """Compiles a pool's grammars, each once; those used last are kept. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, json_options: Mapping[str, Any]):
        """
        Args:
            json_options: llguidance's, for every JSON schema that does not say otherwise.
        """
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._json_options = dict(json_options)
        self._lock, self._building = threading.Lock(), threading.Lock()
        self._kept: OrderedDict[GrammarSource, Future[Grammar]] = OrderedDict()
        self._vocabulary: LLTokenizer | None = None

    def compile(self, source: GrammarSource) -> Grammar:
        """
        Raises:
            InvalidGrammar: It does not parse, or this tokenizer cannot be held to one.
        """
        with self._lock:
            future = self._kept.get(source)
            if mine := future is None:
                future = self._kept[source] = Future()
            self._kept.move_to_end(source)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        if mine:
            self._compile_into(future, source)
        try:
            return future.result()
        except InvalidGrammar as error:  # others may raise it at the same time
            raise InvalidGrammar(str(error)) from None

    def _compile_into(self, future: Future[Grammar], source: GrammarSource) -> None:
        try:
            grammar = self._compile(source)
        except BaseException as error:
            with self._lock:
                if self._kept.get(source) is future:
                    del self._kept[source]
            future.set_exception(error)
        else:
            future.set_result(grammar)

    def _compile(self, source: GrammarSource) -> Grammar:
        from llguidance import LLMatcher

        vocabulary = self._llguidance_tokenizer()
        try:
            grammar = self._grammar(source, vocabulary)
        except (ValueError, RecursionError) as error:
            raise _invalid(source, str(error)) from error
        # Its own log is standard error.
        start = LLMatcher(vocabulary, grammar, log_level=0)
        if not start.is_error():
            allowed = start.compute_bitmask()
            if not start.is_error() and not any(allowed):
                raise _invalid(source, "no token of this vocabulary can begin what it describes")
        if start.is_error():
            raise _invalid(source, start.get_error())
        return Grammar(start, vocabulary.eos_token)

    def _grammar(self, source: GrammarSource, vocabulary: LLTokenizer) -> str:
        """In llguidance's own form."""
        from llguidance import LLMatcher, grammar_from

        if source.kind == "json_schema":
            check_schema(json.loads(source.text))
            defaults: Any = self._json_options
            return LLMatcher.grammar_from_json_schema(source.text, defaults=defaults)
        if source.kind == "structural_tag":
            return structural_tag_grammar(json.loads(source.text), vocabulary)
        if source.kind == "regex":
            return grammar_from("regex", source.text)
        _check_embedded(source.text)
        return grammar_from("ebnf", source.text)

    def _llguidance_tokenizer(self) -> LLTokenizer:
        """Made at the first grammar: for 150,000 tokens it takes a second."""
        from llguidance.hf import from_tokenizer

        with self._building:
            if self._vocabulary is None:
                hf = self._tokenizer.hf
                try:
                    with self._tokenizer.lock:
                        size = max(self._vocab_size, len(hf))
                        self._vocabulary = from_tokenizer(hf, n_vocab=size)
                except Exception as error:
                    raise InvalidGrammar(
                        f"structured output needs a fast Hugging Face tokenizer; llguidance does "
                        f"not take this {type(hf).__name__}: {error}"
                    ) from error
            return self._vocabulary


def _check_embedded(lark: str) -> None:
    """The schemas that a grammar has in it."""
    end = 0
    for place in re.finditer(r"%json\s*", lark):
        if place.end() < end:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, place.end())
        except ValueError:  # llguidance says better what is wrong there
            continue
        check_schema(schema)


def _invalid(source: GrammarSource, why: str) -> InvalidGrammar:
    lines = [line for line in why.splitlines() if line.strip()]
    told = " ".join(" ".join(lines[:4]).split())[:500]
    return InvalidGrammar(f"{source.kind}={described(source.text)} does not compile: {told}")
