"""Compiles a pool's grammars with llguidance, each once.

A grammar may crash or block llguidance, so another process tries it first (`grammar_helper.py`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import CancelledError
from copy import copy
from typing import TYPE_CHECKING, Any

from enginepool.dispatch.grammar import Grammar, GrammarSource, parser_limits
from enginepool.errors import InvalidGrammar, PoolClosed, QueueFull
from enginepool.frontend.cancellation import caller_left
from enginepool.frontend.grammar_helper import (
    GrammarHelper,
    NobodyWaits,
    TrialEnded,
    Vocabulary,
)
from enginepool.frontend.grammar_lane import Job, Lane
from enginepool.frontend.tokenizer import Tokenizer
from enginepool.values import described

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_KEPT = 128
_KEPT_BYTES = 1 << 28
_MOST_WAIT = 32
# The CPU seconds that a grammar may take: on the first lane (the fast worker), then on the last
# lane (the slow worker). Most grammars take milliseconds.
_SHORT_SECONDS, _SECONDS = 0.5, 4.0
_LOOKS_SECONDS = 0.05  # how often a waiting thread checks that its caller is there


class _Refused(Exception):
    """Why a grammar does not compile. The caller's thread decides how much of it to quote."""


class GrammarCompiler:
    """Compiles a pool's grammars and keeps those that were used last. Thread-safe.

    Attributes:
        kept: The compiled grammars. The one that was used last is at the end.
        jobs: The grammars that callers wait for.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, json_options: Mapping[str, Any], name: str
    ):
        """
        Args:
            json_options: llguidance's options for JSON schemas. A schema may override them.
            name: The pool's name.
        """
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._json_options, self._name = dict(json_options), name
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self.kept: OrderedDict[GrammarSource, Grammar] = OrderedDict()
        self.jobs: dict[GrammarSource, Job] = {}
        self._vocabulary: LLTokenizer | None = None
        self._lanes: list[Lane] = []
        self._closed = False

    def compile(self, source: GrammarSource) -> Grammar:
        """
        Raises:
            InvalidGrammar: It does not parse, it needs too much time or memory, or llguidance does
                not support this tokenizer.
            QueueFull: Too many grammars are being compiled.
        """
        with self._lock:
            if (kept := self.kept.get(source)) is not None:
                self.kept.move_to_end(source)
                self._forget()
                return kept
        lane = self._first_lane()
        job = self._join(source, lane)
        try:
            grammar = self._wait(job)
            with self._lock:
                self.kept[source] = grammar
                self._forget()
            return grammar
        finally:
            self._leave(job)

    def close(self) -> None:
        """End all compilations and their processes."""
        with self._starting:
            self._closed = True
            for lane in self._lanes:
                lane.close()

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed(f"pool {self._name!r} was closed")

    def _join(self, source: GrammarSource, lane: Lane) -> Job:
        with self._lock:
            job = self.jobs.get(source)
            if job is None:
                if len(self.jobs) >= _MOST_WAIT:
                    raise QueueFull(
                        f"{len(self.jobs)} grammars are being compiled: at most {_MOST_WAIT} may "
                        "wait; try again later"
                    )
                job = self.jobs[source] = Job(source)
                job.waiting = 1
                lane.put(job)
            else:
                job.waiting += 1
            return job

    def _leave(self, job: Job) -> None:
        with self._lock:
            job.waiting -= 1
            if not job.waiting:
                del self.jobs[job.source]

    def _wait(self, job: Job) -> Grammar:
        while True:
            try:
                return job.done.result(_LOOKS_SECONDS)
            except TimeoutError:
                self._check_open()  # a closed lane leaves jobs that arrive late
                if caller_left():
                    raise CancelledError from None
            except _Refused as error:
                raise _invalid(job.source, str(error)) from None
            except (TrialEnded, NobodyWaits) as error:
                self._check_open()
                raise _invalid(job.source, str(error)) from None

    def _forget(self) -> None:
        """Drop the grammars that were used longest ago, until the others are within bounds."""
        while len(self.kept) > _KEPT or sum(g.nbytes for g in self.kept.values()) > _KEPT_BYTES:
            self.kept.popitem(last=False)

    def _compile_tried(self, answer: Mapping[str, Any]) -> Grammar:
        from llguidance import LLMatcher

        if "error" in answer:
            raise _Refused(answer["error"])
        vocabulary = self._vocabulary
        assert vocabulary is not None
        # log_level=0: its log would go to standard error.
        start = LLMatcher(vocabulary, answer["form"], log_level=0, limits=parser_limits())
        if not start.is_error():
            start.compute_bitmask()
        if start.is_error():
            raise _Refused(start.get_error())
        return Grammar(start, vocabulary.eos_token, answer["bytes"])

    def _first_lane(self) -> Lane:
        """The first lane. Lanes are made for the first grammar, because reading the vocabulary
        takes about a second."""
        with self._starting:
            self._check_open()
            if not self._lanes:
                vocabulary = self._read_vocabulary()
                options = self._json_options
                last = Lane(
                    f"{self._name}-long-grammars",
                    GrammarHelper(vocabulary, options, seconds=_SECONDS, nice=10),
                    self._compile_tried,
                )
                first = Lane(
                    f"{self._name}-grammars",
                    GrammarHelper(vocabulary, options, seconds=_SHORT_SECONDS),
                    self._compile_tried,
                    then=last,
                )
                self._lanes = [first, last]
            return self._lanes[0]

    def _read_vocabulary(self) -> Vocabulary:
        from llguidance import LLTokenizer

        hf = self._tokenizer.hf
        try:
            with self._tokenizer.lock:
                backend = copy(hf.backend_tokenizer)
                backend.no_padding()
                backend.no_truncation()
                text, size = backend.to_str(), max(self._vocab_size, len(hf))
            end = hf.eos_token_id
            self._vocabulary = LLTokenizer(text, n_vocab=size, eos_token=end)
            return Vocabulary(text, size, end)
        except Exception as error:
            raise InvalidGrammar(
                f"structured output needs a fast Hugging Face tokenizer; llguidance does "
                f"not take this {type(hf).__name__}: {error}"
            ) from error


def _invalid(source: GrammarSource, why: str) -> InvalidGrammar:
    lines = [line for line in why.splitlines() if line.strip()]
    told = " ".join(" ".join(lines[:4]).split())[:500]
    return InvalidGrammar(f"{source.kind}={described(source.text)} does not compile: {told}")
