"""The rows of a flight: whose they are, what a step brings them, who has ended.

Reaches into upstream's requests and batches.

What breaks: Upstream looks at every request of a batch after every step, and at most of what it
is made of. For a batch of 64 that takes longer than a chip takes for a small model's step.
Why: What a step may change of a request is not known there.
Remove when: With `program.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from enginepool.dispatch.request import MAX_NAMED_IDS, Request
from enginepool.engine.grammar import RequestGrammar
from enginepool.engine.steady.batch import STOP_IDS, Form, Sampling
from enginepool.engine.steady.penalties import Penalties, recount
from enginepool.engine.top_logprobs import named_values, top_values
from enginepool.model_config.generation import end_ids


class Rows:
    """The requests of a flight. Each has a row until it ends; then another may get it.

    Steps of the flight are counted from 1.

    Attributes:
        reqs: By row: upstream's request that had it last, if any.
        seated: The rows of requests that have not ended, ascending.
        watched: Those for which the host looks whether they have ended: by a string, or by one of
            more stop ids than the device looks for; and those with a grammar, which goes on with
            every token.
        streamed: Those whose callers see every token.
        penalised: Those that have penalties.
        grammars: By row that has one: its grammar, behind its last token.
        live: Those that the steps that were booked last have brought something; some have ended.
        broken: Whether one of these got numbers that are not finite, by the last of the steps.
        limits, sampling, penalties, names: See `batch.Batch`.
        state: By row: the last id, and the length with it, as its first step finds them.
        steps: How many are booked.
    """

    def __init__(self, rows: int, asking: Callable[[Any], Request | None]) -> None:
        """
        Args:
            asking: Of upstream's request, the one of the pool if it wants the most probable ids,
                or names some.
        """
        self.reqs: list[Any] = [None] * rows
        self.seated = np.zeros(0, np.int64)
        self.watched: set[int] = set()
        self.streamed: set[int] = set()
        self.penalised: set[int] = set()
        self.grammars: dict[int, RequestGrammar] = {}
        self.limits = np.zeros((rows, 1 + STOP_IDS), np.int32)
        self.sampling = Sampling.of(rows)
        self.penalties = Penalties.of(rows)
        self.names = np.zeros((rows, MAX_NAMED_IDS), np.int32)
        self.state = np.zeros((2, rows), np.int32)
        self.steps = 0
        # By row: the first and the last step that it can take part in.
        self._first = np.zeros(rows, np.int64)
        self._last = np.zeros(rows, np.int64)
        self._given: list[tuple[Any, Any, Any]] = []
        self._asking, self._asked = asking, dict[int, Request]()
        self.live = self.seated
        self.broken = self._changed = False
        # Of those that are live: the earliest last step, the stop ids if any of them has some.
        self._soonest, self._stops = 0, None

    def seat(self, reqs: Sequence[Any], after: int) -> list[int]:
        """Give these requests rows, which take part from the step after so many on.

        Raises:
            RuntimeError: One is prefilled in part.
        """
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
        if not req.output_ids or req.kv_committed_len < length - 1:
            have = req.kv_committed_len
            raise RuntimeError(f"{req.rid} may not fly: {have} of its {length} tokens are there")
        self.state[:, row] = req.output_ids[-1], length
        self.limits[row] = -1
        # A request that is aborted has one step more, as upstream gives it.
        longest = len(req.origin_input_ids) + params.max_new_tokens
        self.limits[row, 0] = length + 1 if req.to_finish else longest
        self.limits[row, 1 : 1 + len(stops[:STOP_IDS])] = stops[:STOP_IDS]
        self.sampling.put(row, params)
        if req.grammar is not None:
            self.grammars[row] = req.grammar
        if len(stops) > STOP_IDS or params.stop_strs or row in self.grammars:
            self.watched.add(row)
        if req.stream:
            self.streamed.add(row)
        if self.penalties.put(row, req):
            self.penalised.add(row)
        if (request := self._asking(req)) is not None:
            self._asked[row] = request
            self.names[row, : len(request.named_ids)] = request.named_ids

    @property
    def form(self) -> Form:
        asked = self._asked.values()
        return Form(
            penalised=bool(self.penalised),
            top=any(request.top_logprobs_num for request in asked),
            named=any(request.named_ids for request in asked),
            masked=bool(self.grammars),
        )

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

    def book(self, ids: np.ndarray, logprobs: np.ndarray, top: Any, named: Any) -> list[int]:
        """Give the rows of the next steps what these brought; returns those which have ended.

        Every token is in upstream's request at once: who takes requests away, at whatever moment,
        finds all that was fetched. What a row got after its end is dropped, and what all got after
        numbers that are not finite.

        Args:
            ids, logprobs: By step, by row.
            top: The same of the most probable ids, and their log-probabilities; None if nobody
                asks.
            named: By step, by row, the log-probabilities of the ids that it names; None likewise.
        """
        if self._changed:
            self._find_live()
        live, watched = self.live, self.watched
        steps, counts, ended = self._counts(ids, logprobs)
        tokens, values = ids.T.tolist(), logprobs.T.tolist()
        rows = zip(live.tolist(), counts.tolist(), ended.tolist(), self._given, strict=True)
        for place, (row, count, over, (add_ids, add_logprobs, add_indices)) in enumerate(rows):
            row_ids, row_values = tokens[row], values[row]
            if count < len(row_ids):
                row_ids, row_values = row_ids[:count], row_values[:count]
            if row in watched:
                counts[place], has_ended = self._give_watched(row, row_ids, row_values)
                ended[place] = has_ended
            else:
                add_ids(row_ids)
                add_logprobs(row_values)
                add_indices(row_ids)
                has_ended = over and self._has_ended(row)
            if over and not has_ended:
                raise RuntimeError(f"the device has ended {self.reqs[row]}, upstream has not")
        if top is not None or named is not None:
            self._give_asked(counts, top, named)
        gone = live[ended]
        self._last[gone] = self.steps + counts[ended]
        self.steps += steps
        return gone.tolist()

    def _counts(self, ids: np.ndarray, logprobs: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
        """How many of these steps count; by live row, how many of them it takes part in, and
        whether the device has ended it by the last of those."""
        live = self.live
        # Most steps end nobody; for these, what follows would be most of the booking.
        if (
            self.steps + len(ids) < self._soonest
            and (self._stops is None or not (ids[:, live, None] == self._stops).any())
            and np.isfinite(logprobs).all()
        ):
            self.broken = False
            return len(ids), np.full(len(live), len(ids)), np.zeros(len(live), bool)
        steps = np.arange(1, 1 + len(ids))[:, None]
        stopped = (ids[:, live, None] == self.limits[live, 1:]).any(axis=2)
        stopped |= self.steps + steps >= self._last[live]
        ended = stopped.any(axis=0)
        counts = np.where(ended, stopped.argmax(axis=0) + 1, len(ids))
        broken = (~np.isfinite(logprobs[:, live]) & (steps <= counts)).any(axis=1)
        self.broken = bool(broken.any())
        if not self.broken:
            return len(ids), counts, ended
        most = 1 + int(broken.argmax())
        return most, np.minimum(counts, most), ended & (counts <= most)

    def _give_watched(self, row: int, ids: list[int], values: list[float]) -> tuple[int, bool]:
        """Returns how many it got, and whether it has ended by the last of them."""
        req = self.reqs[row]
        for count, (token, value) in enumerate(zip(ids, values, strict=True), 1):
            req.output_ids.append(token)
            req.output_token_logprobs_val.append(value)
            req.output_token_logprobs_idx.append(token)
            if row in self.grammars:
                self.grammars[row].accept_token(token)
            if self._has_ended(row):
                return count, True
        return len(ids), False

    def _give_asked(self, counts: np.ndarray, top: Any, named: Any) -> None:
        for row, count in zip(self.live.tolist(), counts.tolist(), strict=True):
            if (request := self._asked.get(row)) is None:
                continue
            for step in range(count):
                if k := request.top_logprobs_num:
                    ids, logprobs = top
                    request.top_logprobs.append(top_values(logprobs[step, row], ids[step, row], k))
                if names := request.named_ids:
                    request.named_logprobs.append(named_values(named[step, row], len(names)))

    def leave(self, ended: list[int]) -> None:
        """These rows have ended and are free; the device is told by `limits`."""
        self.limits[ended, 0] = 0
        self.seated = np.setdiff1d(self.seated, ended)
        self.watched.difference_update(ended)
        self.streamed.difference_update(ended)
        self.penalised.difference_update(ended)
        for row in ended:
            self._asked.pop(row, None)
            self.grammars.pop(row, None)
        self._changed = True

    def settle(self, rows: np.ndarray) -> np.ndarray:
        """Bring upstream's account of these rows up to date; returns their tokens with KV cache."""
        taken = np.maximum(np.minimum(self.steps, self._last[rows]) - self._first[rows] + 1, 0)
        lengths = self.state[1, rows].astype(np.int64) + taken - 1
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            req = self.reqs[row]
            req.decode_batch_idx += length - req.kv_committed_len
            req.kv_committed_len = req.kv_allocated_len = length
        return lengths

    def _find_live(self) -> None:
        self.live = live = self.seated[self._first[self.seated] <= self.steps + 1]
        self._changed = len(live) < len(self.seated)
        self._soonest = self._last[live].min(initial=np.iinfo(np.int64).max)
        stops = self.limits[live, 1:]
        used = (stops >= 0).any(axis=0)
        self._stops = stops[:, used] if used.any() else None
        self._given = [
            (
                req.output_ids.extend,
                req.output_token_logprobs_val.extend,
                req.output_token_logprobs_idx.extend,
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
        recount(info)


def _stop_ids(req: Any) -> list[int]:
    """What ends a request, as its `check_finished` has it."""
    if req.sampling_params.ignore_eos:
        return []
    named = {*(req.sampling_params.stop_token_ids or ())}
    return sorted(named | end_ids(req.eos_token_ids, req.tokenizer))
