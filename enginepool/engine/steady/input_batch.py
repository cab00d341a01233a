"""The host's side of a decode batch: which request has which row, its tokens, its end.

Reaches into upstream's requests and batches.

What breaks: Upstream visits every request of a batch after every step and reads most of its fields.
For a batch of 64 that takes longer than a small model's step takes on a chip.
Why: Upstream does not know which fields a step may change.
Remove when: With `program.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from enginepool.dispatch.request import MAX_NAMED_IDS, Request
from enginepool.engine.grammar import RequestGrammar
from enginepool.engine.steady.device_batch import FROM_TABLE, STOP_IDS, Features, RowTable
from enginepool.engine.steady.extras import Extras
from enginepool.engine.steady.penalties import stop_ids

if TYPE_CHECKING:
    from sgl_jax.srt.managers.schedule_batch import Req

# Appends to a request's ids, to its log-probabilities, and to the ids of these.
type _Extend = tuple[
    Callable[[list[int]], None], Callable[[list[float]], None], Callable[[list[int]], None]
]


class InputBatch:
    """The requests that decode together. Each has a row until it ends.

    Steps are counted from 1.

    Attributes:
        reqs: By row: upstream's request that had the row last, or None.
        active: The rows of requests that have not ended, ascending.
        watched: Active rows whose end the host looks for: they have stop strings, more stop ids
            than the device looks for, or a grammar.
        streamed: Active rows whose callers see every token.
        penalised: Active rows that have penalties.
        grammars: By row: its grammar, if it has one. It has accepted all tokens of the row.
        latest: The rows that got tokens from the last steps. Some of them have ended since.
        not_finite: Whether one of these rows got a log-probability that is not finite.
        table: The rows as they are sent to the device. `limits` and `state` are columns of it.
        names: See `device_batch.DeviceBatch`.
        steps: The number of the last step whose tokens the requests have.
    """

    def __init__(
        self,
        rows: int,
        vocab_size: int,
        with_extras: Callable[[Req], Request | None],
        adapter_row: Callable[[Req], tuple[int, float]],
    ) -> None:
        """
        Args:
            with_extras: Returns the pool's request for one of upstream's, if it wants more values
                per token than the id and the log-probability.
            adapter_row: Returns the slot and the scale of a request's adapter.
        """
        self.reqs: list[Any] = [None] * rows
        self._taken = np.zeros(rows, bool)
        self.active = np.flatnonzero(self._taken)
        self.watched: set[int] = set()
        self.streamed: set[int] = set()
        self.penalised: set[int] = set()
        self.grammars: dict[int, RequestGrammar] = {}
        self.table = RowTable(rows)
        self.limits, self.state = self.table.limits, self.table.state
        self.names = np.zeros((rows, MAX_NAMED_IDS), np.int32)
        self.steps = 0
        # By row: the first step that it takes part in, and the latest step that can be its last.
        self._first = np.zeros(rows, np.int64)
        self._last = np.zeros(rows, np.int64)
        self._extend: list[_Extend] = []  # of the latest rows
        self._extend_of: dict[int, _Extend] = {}
        self._vocab_size, self._adapter_row = vocab_size, adapter_row
        self._with_extras, self._extras = with_extras, dict[int, Request]()
        self.latest = self.active
        self.not_finite = self._changed = False
        # The smallest `_last` of the latest rows, and their stop ids if any row has some.
        self._soonest, self._stops = 0, None

    def add_requests(self, reqs: Sequence[Req], origins: Sequence[int], after: int) -> list[int]:
        """Give each request a free row. It takes part in all steps after step `after`.

        Args:
            origins: From where the device takes their states, see `device_batch.py`.

        Returns:
            The rows.

        Raises:
            RuntimeError: A request is only partly prefilled.
        """
        rows: list[int] = np.flatnonzero(~self._taken)[: len(reqs)].tolist()
        for row, req, origin in zip(rows, reqs, origins, strict=True):
            self._add_request(row, req, origin)
        self._first[rows] = after + 1
        self._last[rows] = after + self.limits[rows, 0] - self.state[1, rows]
        self._taken[rows] = True
        self.active = np.flatnonzero(self._taken)
        self._changed = True
        return rows

    def _add_request(self, row: int, req: Req, origin: int) -> None:
        params, stops = req.sampling_params, stop_ids(req)
        self.reqs[row] = req
        length = len(req.origin_input_ids) + len(req.output_ids) + (origin != FROM_TABLE)
        if length == len(req.origin_input_ids) or req.kv_committed_len < length - 1:
            have = req.kv_committed_len
            raise RuntimeError(f"{req.rid} cannot decode: {have} of {length} tokens have KV cache")
        self.state[:, row] = (req.output_ids or [0])[-1], length
        self.table.origin[row] = origin
        values: Any = req.output_token_logprobs_val
        indices: Any = req.output_token_logprobs_idx
        self._extend_of[row] = req.output_ids.extend, values.extend, indices.extend
        self.limits[row] = -1
        self.limits[row, 0] = len(req.origin_input_ids) + params.max_new_tokens
        self.limits[row, 1 : 1 + len(stops[:STOP_IDS])] = stops[:STOP_IDS]
        self.table.set_sampling(row, params)
        if req.grammar is not None:
            self.grammars[row] = req.grammar
        if len(stops) > STOP_IDS or params.stop_strs or row in self.grammars:
            self.watched.add(row)
        if req.stream:
            self.streamed.add(row)
        if self.table.penalties.set_row(row, req):
            self.penalised.add(row)
        self.table.set_adapter(row, *self._adapter_row(req))
        if (request := self._with_extras(req)) is not None:
            self._extras[row] = request
            self.names[row, : len(request.named_ids)] = request.named_ids

    @property
    def features(self) -> Features:
        asking = self._extras.values()
        return Features.of(asking, penalised=bool(self.penalised), masked=bool(self.grammars))

    @property
    def free(self) -> int:
        """How many rows are free."""
        return len(self.reqs) - len(self.active)

    @property
    def most_left(self) -> int:
        """After how many steps all rows have ended for sure."""
        return int(self._last[self.active].max(initial=0)) - self.steps

    def lengths_in(self, step: int) -> np.ndarray:
        """By active row: how many tokens have KV cache after a step."""
        rows = self.active
        taken = np.minimum(step, self._last[rows]) - self._first[rows] + 1
        return self.state[1, rows] + taken - 1

    def append_tokens(self, ids: np.ndarray, logprobs: np.ndarray, extras: Extras) -> list[int]:
        """Append the tokens of the next steps to upstream's requests.

        Whoever takes the requests away afterwards finds all tokens there. Tokens after a row's end
        are dropped, and so are all tokens after a log-probability that is not finite.

        Args:
            ids, logprobs: By step, by row.

        Returns:
            The rows that have ended.
        """
        if self._changed:
            self._find_latest()
        latest, watched = self.latest, self.watched
        steps, counts, ended = self._counts(ids, logprobs)
        tokens, values = ids.T.tolist(), logprobs.T.tolist()
        rows = zip(latest.tolist(), counts.tolist(), ended.tolist(), self._extend, strict=True)
        for place, (row, count, over, (add_ids, add_logprobs, add_indices)) in enumerate(rows):
            row_ids, row_values = tokens[row], values[row]
            if count < len(row_ids):
                row_ids, row_values = row_ids[:count], row_values[:count]
            if row in watched:
                counts[place], has_ended = self._append_watched(row, row_ids, row_values)
                ended[place] = has_ended
            else:
                add_ids(row_ids)
                add_logprobs(row_values)
                add_indices(row_ids)
                has_ended = over and self._has_ended(row)
            if over and not has_ended:
                raise RuntimeError(f"the device has ended {self.reqs[row]}, upstream has not")
        if extras:
            self._append_extras(counts, extras)
        gone = latest[ended]
        self._last[gone] = self.steps + counts[ended]
        self.steps += steps
        return gone.tolist()

    def _counts(self, ids: np.ndarray, logprobs: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
        """Returns how many of these steps count; for each latest row, how many steps it takes part
        in; and for each latest row, whether it ends with its last step."""
        latest = self.latest
        # Most steps end no row. The rest of this function would take most of their time.
        if (
            self.steps + len(ids) < self._soonest
            and (self._stops is None or not (ids[:, latest, None] == self._stops).any())
            and np.isfinite(logprobs).all()
        ):
            self.not_finite = False
            return len(ids), np.full(len(latest), len(ids)), np.zeros(len(latest), bool)
        steps = np.arange(1, 1 + len(ids))[:, None]
        stopped = (ids[:, latest, None] == self.limits[latest, 1:]).any(axis=2)
        stopped |= self.steps + steps >= self._last[latest]
        ended = stopped.any(axis=0)
        counts = np.where(ended, stopped.argmax(axis=0) + 1, len(ids))
        not_finite = (~np.isfinite(logprobs[:, latest]) & (steps <= counts)).any(axis=1)
        self.not_finite = bool(not_finite.any())
        if not self.not_finite:
            return len(ids), counts, ended
        most = 1 + int(not_finite.argmax())
        return most, np.minimum(counts, most), ended & (counts <= most)

    def _append_watched(self, row: int, ids: list[int], values: list[float]) -> tuple[int, bool]:
        """Returns how many tokens were appended, and whether the last one ended the request."""
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

    def _append_extras(self, counts: np.ndarray, extras: Extras) -> None:
        experts = extras.experts
        for row, count in zip(self.latest.tolist(), counts.tolist(), strict=True):
            if (request := self._extras.get(row)) is None:
                continue
            if experts is not None and request.experts is not None:
                req = self.reqs[row]
                known = len(req.origin_input_ids) + len(req.output_ids) - count - 1
                request.experts.extend(known, experts[:count, row])
            for step in range(count if request.wants_more else 0):
                extras.append_to(request, step, row, self._vocab_size)

    def remove(self, ended: list[int]) -> None:
        """Free these rows. The device learns it from `limits`."""
        self.limits[ended, 0] = 0
        self._taken[ended] = False
        self.active = np.flatnonzero(self._taken)
        self.watched.difference_update(ended)
        self.streamed.difference_update(ended)
        self.penalised.difference_update(ended)
        for row in ended:
            self._extras.pop(row, None)
            self.grammars.pop(row, None)
        self._changed = True

    def write_back(self, rows: np.ndarray) -> np.ndarray:
        """Tell upstream's requests how many of their tokens have KV cache. Returns that by row."""
        taken = np.maximum(np.minimum(self.steps, self._last[rows]) - self._first[rows] + 1, 0)
        lengths = self.state[1, rows].astype(np.int64) + taken - 1
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            req = self.reqs[row]
            req.decode_batch_idx += length - req.kv_committed_len
            req.kv_committed_len = req.kv_allocated_len = length
        return lengths

    def _find_latest(self) -> None:
        self.latest = latest = self.active[self._first[self.active] <= self.steps + 1]
        self._changed = len(latest) < len(self.active)
        self._soonest = self._last[latest].min(initial=np.iinfo(np.int64).max)
        stops = self.limits[latest, 1:]
        used = (stops >= 0).any(axis=0)
        self._stops = stops[:, used] if used.any() else None
        self._extend = [self._extend_of[row] for row in latest.tolist()]

    def _has_ended(self, row: int) -> bool:
        req = self.reqs[row]
        req.check_finished()
        return req.finished()
