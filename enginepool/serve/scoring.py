"""sglang's `/v1/score`: how probable given tokens are after each of some texts."""

from __future__ import annotations

import itertools
import math
from typing import Any

from anyio.to_thread import run_sync

from enginepool.errors import InvalidRequest
from enginepool.requests.request import Call
from enginepool.requests.submission import submitted
from enginepool.requests.wait import async_wait_all
from enginepool.serve.handler import Exchange
from enginepool.serve.record import cut_short
from enginepool.values import shown


class ScoreExchange(Exchange):
    """Upstream's class for scores takes it for its TokenizerManager."""

    async def score_request(
        self,
        query: Any = None,
        items: Any = None,
        label_token_ids: list[int] | None = None,
        apply_softmax: bool = False,
        item_first: bool = False,
        request: Any = None,
    ) -> list[list[float]]:
        """For each item the probability of each label as the next token, after query and item.

        Each label is a continuation of its own, so a prompt is computed once for each.
        """
        del request
        try:
            self._host.check_open()
            labels = list(label_token_ids or ())
            prompts = self._prompts(query, items, labels, item_first)
            self.call = await run_sync(self._make_score_call, prompts, labels)
            await self._wait(self.call)
        except Exception as error:
            self.failure = error
            raise ValueError(str(error)) from error  # the only kind that upstream's catches
        values = [
            value
            for one in self.call.requests
            if one.scored is not None and (value := one.scored.logprobs[0]) is not None
        ]
        rows = [list(row) for row in itertools.batched(values, len(labels))]
        return [_softmax(row) if apply_softmax else [math.exp(v) for v in row] for row in rows]

    def _prompts(self, query: Any, items: Any, labels: list[int], item_first: bool) -> list[Any]:
        if not labels:
            raise InvalidRequest("label_token_ids: give the ids of the tokens that are meant")
        items = [items] if isinstance(items, str) else items
        if not items:
            raise InvalidRequest("items: give at least one")
        limits = self._options.max_prompts, self._host.max_queued
        if len(items) > limits[0]:
            raise InvalidRequest(
                f"{len(items)} items: at most {limits[0]} are taken in one request (--max-prompts)"
            )
        if limits[1] is not None and len(items) * len(labels) > limits[1]:
            raise InvalidRequest(
                f"{len(items)} items times {len(labels)} labels are too many for one call: at most "
                f"{limits[1]} may wait (--max-queued-requests)"
            )
        kind = str if isinstance(query, str) else list
        if query is None or any(not isinstance(item, kind) for item in items):
            raise InvalidRequest(
                f"query={shown(query)}: query and items are either texts or lists of token ids, "
                "both the same"
            )
        size = sum(len(query) + len(item) for item in items) * len(labels)
        if size > self._options.max_body_bytes:
            raise InvalidRequest(
                f"{len(items)} items with the query before each, {len(labels)} labels times, are "
                f"{size} characters or ids: at most {self._options.max_body_bytes} are taken "
                "(--max-body-bytes); send several"
            )
        return [item + query if item_first else query + item for item in items]

    def _make_score_call(self, prompts: list[Any], labels: list[int]) -> Call:
        if isinstance(prompts[0], str):
            for text in prompts:
                self.tokenizer.check_text(text)
            prompts = self._front.runtime.input_processor.tokenizer.encode(prompts)
        each = [prompt for prompt in prompts for _ in labels]
        return self._front.make_score_call(each, [[label] for _ in prompts for label in labels])

    async def _wait(self, call: Call) -> None:
        dispatch = self._front.runtime.dispatch
        with submitted(dispatch, call):
            await async_wait_all(dispatch, call, self._options.request_timeout)
        if (error := call.failure or cut_short(call)) is not None:
            raise error


def _softmax(row: list[float]) -> list[float]:
    most = max(row)
    each = [math.exp(value - most) for value in row]
    return [value / sum(each) for value in each]
