"""The rows of a flight: whose they are, what a step brings them, who has ended.

Reaches into upstream's requests and batches.

What breaks: Upstream looks at every request of a batch after every step, and at most of what it
is made of. For a batch of 64 that takes longer than a chip takes for a small model's step.
Why: What a step may change of a request is not known there.
Remove when: With `program.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from enginepool.engine.steady.program import STOP_IDS


class Rows:
    """The requests of one batch in its order, which keep their rows until the flight ends.

    Attributes:
        reqs: Upstream's requests.
        lengths: Their tokens when the flight begins, the one that the first step takes included.
        live: The rows of those that have not ended, ascending.
        watched: The rows of those for which the host looks whether they have ended: by a string,
            or by one of more stop ids than the device looks for.
        streamed: The rows of those whose callers see every token.
        limits: See `program.Batch`, for so many rows as the program has.
    """

    def __init__(self, info: Any, rows: int) -> None:
        """
        Args:
            info: Upstream's account of the batch, prepared for the first step.
        """
        self._info = info
        self.reqs: list[Any] = info.reqs
        self.lengths = np.asarray(info.seq_lens, np.int64)
        self.limits = np.full((rows, 1 + STOP_IDS), -1, np.int32)
        self.limits[:, 0] = 0
        self.watched: set[int] = set()
        for row, req in enumerate(self.reqs):
            stops = _stop_ids(req)
            self.limits[row, 0] = len(req.origin_input_ids) + req.sampling_params.max_new_tokens
            self.limits[row, 1 : 1 + len(stops)] = stops[:STOP_IDS]
            if len(stops) > STOP_IDS or req.sampling_params.stop_strs:
                self.watched.add(row)
        count = len(self.reqs)
        # Steps after which a row ends by length, if by nothing before.
        self._left = self.limits[:count, 0] - self.lengths
        self._stops = self.limits[:count, 1:]
        self._steps = 0
        self.live = np.arange(count)
        self.streamed = [row for row, req in enumerate(self.reqs) if req.stream]
        self._outputs = self._of_live()

    @property
    def most_left(self) -> int:
        """Steps until every row has ended at the latest."""
        return int(self._left[self.live].max(initial=0)) - self._steps

    def lengths_in(self, step: int) -> np.ndarray:
        """Tokens of the live rows that a step of the flight looks at, the first being 1."""
        return np.minimum(self.lengths[self.live] + step, self.limits[self.live, 0]) - 1

    def book(self, ids: np.ndarray, logprobs: np.ndarray) -> list[int]:
        """Give the live rows what a step brought; returns those which have ended by it.

        Every token is in upstream's request at once: who takes requests away, at whatever moment,
        finds all that was fetched.
        """
        self._steps += 1
        given = zip(
            self._outputs, ids[self.live].tolist(), logprobs[self.live].tolist(), strict=True
        )
        for (add_id, add_logprob, add_index), token, logprob in given:
            add_id(token)
            add_logprob(logprob)
            add_index(token)
        stopped = (ids[: len(self.reqs), None] == self._stops).any(axis=1)
        ended = (stopped | (self._left <= self._steps))[self.live]
        rows = self.live[ended].tolist()
        assert all(map(self._has_ended, rows)), "the device ends other requests than upstream"
        return rows + [row for row in self.watched.difference(rows) if self._has_ended(row)]

    def leave(self, rows: list[int]) -> None:
        """These rows have ended and get no more tokens; the device is told by `limits`."""
        self.limits[rows, 0] = 0
        self.live = np.setdiff1d(self.live, rows)
        self.watched.difference_update(rows)
        self.streamed = [row for row in self.streamed if row not in rows]
        self._outputs = self._of_live()

    def settle(self, rows: Iterable[int]) -> np.ndarray:
        """Bring upstream's account of these rows up to date; returns their tokens with KV cache."""
        more = self._steps - 1
        rows = list(rows)
        for req in [self.reqs[row] for row in rows]:
            req.kv_committed_len += more
            req.kv_allocated_len += more
            req.decode_batch_idx += more
        return self.lengths[rows] + more

    def land(self) -> None:
        """Bring upstream's account of the batch up to date, as after a step of its own."""
        info, more = self._info, self._steps - 1
        lengths = info.seq_lens.copy()
        lengths[self.live] += more
        info.seq_lens, info.seq_lens_sum = lengths, int(lengths.sum())
        info.output_ids = np.array([req.output_ids[-1] for req in self.reqs], np.int32)

    def _has_ended(self, row: int) -> bool:
        req = self.reqs[row]
        req.check_finished()
        return req.finished()

    def _of_live(self) -> list[tuple[Any, Any, Any]]:
        reqs = [self.reqs[row] for row in self.live]
        return [
            (
                req.output_ids.append,
                req.output_token_logprobs_val.append,
                req.output_token_logprobs_idx.append,
            )
            for req in reqs
        ]


def flies(batch: Any) -> bool:
    """Whether nothing about a decode batch needs upstream's own step."""
    if len(batch.reqs_info) != 1 or batch.has_grammar or batch.return_hidden_states:
        return False
    if batch.return_logprob or not batch.return_output_logprob_only:
        return False
    info = batch.reqs_info[0]
    if info.sampling_info.penalizer_orchestrator.is_required:
        return False
    return all(req.to_finish is None and not req.is_retracted for req in info.reqs)


def _stop_ids(req: Any) -> list[int]:
    """What ends a request, as its `check_finished` has it."""
    if req.sampling_params.ignore_eos:
        return []
    stops = {*(req.sampling_params.stop_token_ids or ()), *(req.eos_token_ids or ())}
    if req.tokenizer is not None:
        stops.add(req.tokenizer.eos_token_id)
        stops.update(req.tokenizer.additional_stop_token_ids or ())
    stops.discard(None)
    return sorted(map(int, stops))
