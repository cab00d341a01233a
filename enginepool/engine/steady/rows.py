"""The rows of a flight: whose they are, what a step brings them, who has ended.

Reaches into upstream's requests and batches.

What breaks: Upstream looks at every request of a batch after every step, and at most of what it
is made of. For a batch of 64 that takes longer than a chip takes for a small model's step.
Why: What a step may change of a request is not known there.
Remove when: With `program.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from enginepool.engine.steady.program import STOP_IDS, Sampling


class Rows:
    """The requests of a flight. Each has a row until it ends; then another may get it.

    Steps of the flight are counted from 1.

    Attributes:
        reqs: By row: upstream's request that had it last, if any.
        seated: The rows of requests that have not ended, ascending.
        watched: Those for which the host looks whether they have ended: by a string, or by one of
            more stop ids than the device looks for.
        streamed: Those whose callers see every token.
        live: Those that the step that was booked last has brought something; some have ended by it.
        limits, sampling: See `program.Batch`.
        state: By row: the last id, and the length with it, as its first step finds them.
        steps: How many are booked.
    """

    def __init__(self, rows: int) -> None:
        self.reqs: list[Any] = [None] * rows
        self.seated = np.zeros(0, np.int64)
        self.watched: set[int] = set()
        self.streamed: set[int] = set()
        self.limits = np.zeros((rows, 1 + STOP_IDS), np.int32)
        self.sampling = Sampling.of(rows)
        self.state = np.zeros((2, rows), np.int32)
        self.steps = 0
        # By row: the first and the last step that it can take part in.
        self._first = np.zeros(rows, np.int64)
        self._last = np.zeros(rows, np.int64)
        self._given: list[tuple[int, Any, Any, Any]] = []
        self.live = self.seated
        self._changed = False

    def seat(self, reqs: Sequence[Any], after: int) -> list[int]:
        """Give these requests rows, which take part from the step after so many on."""
        taken = set(self.seated.tolist())
        free = (row for row in range(len(self.reqs)) if row not in taken)
        rows = [row for row, _ in zip(free, reqs, strict=False)]
        for row, req in zip(rows, reqs, strict=True):
            self._seat(row, req)
        self._first[rows] = after + 1
        self._last[rows] = after + self.limits[rows, 0] - self.state[1, rows]
        self.seated = np.union1d(self.seated, rows).astype(np.int64)
        self._changed = True
        return rows

    def _seat(self, row: int, req: Any) -> None:
        params, stops = req.sampling_params, _stop_ids(req)
        self.reqs[row] = req
        length = len(req.origin_input_ids) + len(req.output_ids)
        self.state[:, row] = req.output_ids[-1], length
        self.limits[row] = -1
        self.limits[row, 0] = len(req.origin_input_ids) + params.max_new_tokens
        self.limits[row, 1 : 1 + len(stops[:STOP_IDS])] = stops[:STOP_IDS]
        self.sampling.put(row, params)
        if len(stops) > STOP_IDS or params.stop_strs:
            self.watched.add(row)
        if req.stream:
            self.streamed.add(row)

    @property
    def free(self) -> int:
        """How many rows nobody has."""
        return len(self.reqs) - len(self.seated)

    @property
    def most_left(self) -> int:
        """Steps until every row has ended at the latest."""
        return int(self._last[self.seated].max(initial=0)) - self.steps

    def lengths_in(self, step: int) -> np.ndarray:
        """Tokens with KV cache of the seated rows after a step."""
        rows = self.seated
        taken = np.minimum(step, self._last[rows]) - self._first[rows] + 1
        return self.state[1, rows] + taken - 1

    def book(self, ids: np.ndarray, logprobs: np.ndarray) -> list[int]:
        """Give the rows of the next step what it brought; returns those which have ended by it.

        Every token is in upstream's request at once: who takes requests away, at whatever moment,
        finds all that was fetched.
        """
        self.steps += 1
        if self._changed:
            self._find_live()
        tokens, values = ids.tolist(), logprobs.tolist()
        for row, add_id, add_logprob, add_index in self._given:
            token = tokens[row]
            add_id(token)
            add_logprob(values[row])
            add_index(token)
        live = self.live
        stopped = (ids[live, None] == self.limits[live, 1:]).any(axis=1)
        ended = live[stopped | (self._last[live] <= self.steps)].tolist()
        if others := [row for row in ended if not self._has_ended(row)]:
            raise RuntimeError(f"the device has ended {self.reqs[others[0]]}, upstream has not")
        if self.watched:
            others = self.watched.intersection(live.tolist()).difference(ended)
            ended += [row for row in others if self._has_ended(row)]
        return ended

    def leave(self, ended: list[int]) -> None:
        """These rows have ended and are free; the device is told by `limits`."""
        self.limits[ended, 0] = 0
        self.seated = np.setdiff1d(self.seated, ended)
        self.watched.difference_update(ended)
        self.streamed.difference_update(ended)
        self._changed = True

    def settle(self, rows: np.ndarray) -> np.ndarray:
        """Bring upstream's account of these rows up to date; returns their tokens with KV cache."""
        taken = np.maximum(self.steps - self._first[rows] + 1, 0)
        lengths = self.state[1, rows].astype(np.int64) + taken - 1
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            req = self.reqs[row]
            req.decode_batch_idx += length - req.kv_committed_len
            req.kv_committed_len = req.kv_allocated_len = length
        return lengths

    def _find_live(self) -> None:
        self.live = live = self.seated[self._first[self.seated] <= self.steps]
        self._changed = len(live) < len(self.seated)
        self._given = [
            (
                row,
                req.output_ids.append,
                req.output_token_logprobs_val.append,
                req.output_token_logprobs_idx.append,
            )
            for row in live.tolist()
            for req in [self.reqs[row]]
        ]

    def _has_ended(self, row: int) -> bool:
        req = self.reqs[row]
        req.check_finished()
        return req.finished()


def settle(batch: Any) -> None:
    """Bring upstream's account of a batch up to date with its requests, as after its own step."""
    info = batch.reqs_info[0]
    if info.reqs:
        lengths = [req.kv_committed_len for req in info.reqs]
        info.seq_lens = np.array(lengths, np.asarray(info.seq_lens).dtype)
        info.seq_lens_sum = sum(lengths)
        info.output_ids = np.array([req.output_ids[-1] for req in info.reqs], np.int32)


def flies(batch: Any) -> bool:
    """Whether nothing about a batch's requests needs upstream's own decode step."""
    if len(batch.reqs_info) != 1 or batch.has_grammar or batch.return_hidden_states:
        return False
    if batch.return_logprob or not batch.return_output_logprob_only:
        return False
    info = batch.reqs_info[0]
    if info.sampling_info.penalizer_orchestrator.is_required:
        return False
    return all(
        req.to_finish is None
        and not req.is_retracted
        and req.sampling_params.sampling_seed is not None
        for req in info.reqs
    )


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
