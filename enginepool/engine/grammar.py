"""A request's grammar, in the form that upstream's scheduler and worker call.

Reaches into upstream's requests: their attribute `grammar` gets an object of ours.

What breaks: All requests with the same grammar share one state, and a grammar that does not parse
ends the engine. In a batch with a grammar, a request without one may sample no token at all.
Why: Upstream caches one copy of a grammar's state and shares it, and it parses grammars in the
engine. Its mask begins as zeros, and only rows with a grammar are filled.
Remove when: Each request has a state of its own, and rows without a grammar are not masked.

The mask is an argument of a program that runs anyway, so it needs no program of its own. In
upstream's steps it is an argument of the sampler, and is computed while the device runs the model.
In steady steps it is computed before the step is launched, and sent with the batch.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from enginepool.dispatch.grammar import Grammar
from enginepool.dispatch.thinking import Thinking, Thought
from enginepool.process.upstream import expect

_ALL = np.uint32((1 << 32) - 1)

# The seconds that a request's masks may take: this many per token, plus this many per request. All
# requests of an engine wait meanwhile. Most masks take a tenth of a millisecond.
_A_TOKEN = 0.003
_IN_ADVANCE = 0.5


class RequestGrammar:
    """Which tokens may come next in one request: a function of its output ids.

    Attributes:
        finished: Set by upstream: whether the request has ended.
        failure: Why no token can come next, if none can. Then the end token is sampled.
    """

    def __init__(
        self,
        grammar: Grammar,
        ends: Iterable[int],
        output_ids: Sequence[int],
        thinking: Thinking | None = None,
    ) -> None:
        """
        Args:
            ends: The model's end tokens. They may come wherever the grammar allows an end.
            output_ids: The outputs that a resumed request already has.
            thinking: Describes the thinking before the answer, if there is any.
        """
        self._grammar = grammar
        self._matcher = grammar.matcher()
        # If the tokenizer names no end token, llguidance uses an id that is none of the model's.
        self._complete = grammar.eos_token_id
        self._ends = sorted({*ends} or {self._complete})
        self.finished = False
        self.failure: str | None = None
        self._owed = 0.0  # seconds taken beyond the allowance of its tokens
        self._thought = None if thinking is None else Thought(thinking)
        without_ends = [token for token in output_ids if token not in self._ends]
        if answer := list(itertools.dropwhile(self._is_thought, without_ends)):
            with self._taking(len(answer)):
                self._matcher.consume_tokens(answer)

    def accept_token(self, token: int) -> None:
        """Advance by a token of the output."""
        if self.failure is None and token not in self._ends and not self._is_thought(token):
            with self._taking(tokens=0):
                self._matcher.consume_token(token)

    def _is_thought(self, token: int) -> bool:
        """Advance the thinking by one output token. Returns whether the token comes before the part
        that the grammar describes."""
        if self._thought is None:
            return False
        with self._taking(tokens=0):
            fits = self._thought.first_id is not None
            fits = fits and self._matcher.validate_tokens([token]) == 1
        said = self._thought.take(token, fits_answer=fits)
        if said:
            self.failure = f"a token ended the thinking and also began the answer: {len(said)} "
            self.failure += "characters of it were not checked against the grammar"
        return said is not None

    def is_terminated(self) -> bool:
        """Never: after a complete output the end token is sampled."""
        return False

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int) -> np.ndarray:
        """Make the mask of the whole batch; upstream asks the first grammar in it. Each step gets a
        new one, because the last one may still be on its way to the device."""
        return open_mask(vocab_size, batch_size)

    def fill_vocab_mask(self, vocab_mask: np.ndarray, idx: int) -> None:
        """Fill in which tokens may come next. At least one may, because sampling from none is
        undefined."""
        row = vocab_mask[idx].view(np.uint32)
        if self._thought is not None and self._thought.state == "goes on" and not self.failure:
            row[:] = _ALL
            return
        row[:] = 0
        if self.failure is None:
            with self._taking(tokens=1):
                allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: len(row)]
            row[: len(allowed)] = allowed
            if self.failure is None and not row.any():
                self.failure = "no token of the vocabulary continues what the grammar describes"
        known = [end for end in (*self._ends, self._complete) if end < 32 * len(row)]
        words = [(end // 32, np.uint32(1 << end % 32)) for end in known]
        may_end = self.failure is not None or any(row[word] & bit for word, bit in words)
        if self.failure is not None:
            row[:] = 0
        for end, (word, bit) in zip(known, words, strict=True):
            if end not in self._ends:
                row[word] &= ~bit
            elif may_end:
                row[word] |= bit
        first = None if self._thought is None else self._thought.first_id
        if first is not None and self.failure is None:
            row[first // 32] |= np.uint32(1 << first % 32)

    @contextlib.contextmanager
    def _taking(self, tokens: int) -> Iterator[None]:
        """Charge the time that the matcher takes inside the block, less the allowance for
        `tokens`."""
        began = time.thread_time()
        yield
        taken = time.thread_time() - began
        self._grammar.seconds += taken
        self._owed = max(0.0, self._owed + taken - tokens * _A_TOKEN)
        if self._matcher.is_error():
            lines = self._matcher.get_error().strip().splitlines()
            self.failure = lines[0] if lines else "llguidance gives no reason"
        elif self._owed > _IN_ADVANCE:
            self.failure = (
                "computing the allowed next tokens takes too long: the limit is "
                f"{_IN_ADVANCE:g} s plus {1000 * _A_TOKEN:g} ms per token; make the grammar's "
                "expressions shorter"
            )


def open_mask(vocab_size: int, batch_size: int) -> np.ndarray:
    """A mask that allows every id in every row. It has one bit for each id."""
    return np.full((batch_size, -(-vocab_size // 32)), -1, np.int32)


def check_upstream() -> None:
    """
    Raises:
        EnginePoolError: Upstream does not ask a request's grammar for its part of the mask.
    """
    from sgl_jax.srt.managers.schedule_batch import ModelWorkerSamplingInfo

    expect(ModelWorkerSamplingInfo, "update_grammar_vocab_mask")
