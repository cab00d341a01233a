"""sglang's `/v1/score`: how probable given tokens are after each of some texts."""

from __future__ import annotations

import itertools
import math
from typing import Any

from anyio.to_thread import run_sync

from enginepool.dispatch.request import MAX_NAMED_IDS, Call
from enginepool.dispatch.wait import async_wait_all, submitted
from enginepool.errors import InvalidRequest
from enginepool.serve.error_replies import as_refused
from enginepool.serve.exchange import Exchange
from enginepool.serve.record import cut_short
from enginepool.serve.request_limits import MAX_VALUES
from enginepool.values import described


class ScoreExchange(Exchange):
    """Replaces the TokenizerManager of upstream's class for scores.

    Attributes:
        adapter: The name of the adapter to score with; None for the base.
    """

    adapter: str | None = None

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

        An engine scores at most `MAX_NAMED_IDS` labels at a time. With more labels, a prompt is
        computed several times.
        """
        del request
        try:
            self._exchanges.check_open()
            labels = list(label_token_ids or ())
            prompts = self._prompts(query, items, labels, item_first)
            async with self.models.loaded(self.adapter):
                self.call = await run_sync(self._make_score_call, prompts, labels)
            self._before_submission(self.call)
            await self._wait(self.call)
        except Exception as error:
            self.failure = as_refused(error)
            raise ValueError(str(error)) from error  # upstream's class catches only this
        values = [
            value
            for one in self.call.requests
            if one.scored is not None
            for place in one.scored.named_logprobs
            for value in place or ()
        ]
        rows = [list(row) for row in itertools.batched(values, len(labels))]
        return [_softmax(row) if apply_softmax else [math.exp(v) for v in row] for row in rows]

    def _prompts(self, query: Any, items: Any, labels: list[int], item_first: bool) -> list[Any]:
        if not labels:
            raise InvalidRequest("label_token_ids: give the ids of the tokens to score")
        size = self._front.runtime.input_processor.limits.vocab_size
        for label in labels:
            if not 0 <= label < size:
                raise InvalidRequest(
                    f"label_token_ids: token id {label} is outside the vocabulary of {size} tokens"
                )
        items = [items] if isinstance(items, str) else items
        if not items:
            raise InvalidRequest("items: give at least one")
        if len(items) > (most := self._options.max_prompts):
            raise InvalidRequest(
                f"{len(items)} items: at most {most} are taken in one request (--max-prompts)"
            )
        if len(items) * len(labels) > MAX_VALUES:
            raise InvalidRequest(
                f"{len(items)} items with {len(labels)} labels are too much for one reply: at most "
                f"{MAX_VALUES} probabilities; send several"
            )
        times = len(_chunks(labels))
        count = len(items) * times
        if self._max_queued is not None and count > self._max_queued:
            raise InvalidRequest(
                f"{len(items)} items with {len(labels)} labels are {count} requests, too many for "
                f"one call: at most {self._max_queued} may wait (--max-queued-requests)"
            )
        kind = str if isinstance(query, str) else list
        if query is None or any(not isinstance(item, kind) for item in items):
            raise InvalidRequest(
                f"query={described(query)}: query and items must all be texts, or all be lists of "
                "token ids"
            )
        size = sum(len(query) + len(item) for item in items) * times
        if size > self._options.max_body_bytes:
            raise InvalidRequest(
                f"{len(items)} items with the query before each, computed {times} times for "
                f"{len(labels)} labels, are {size} characters or ids: at most "
                f"{self._options.max_body_bytes} are taken (--max-body-bytes); send several"
            )
        return [item + query if item_first else query + item for item in items]

    def _make_score_call(self, prompts: list[Any], labels: list[int]) -> Call:
        if isinstance(prompts[0], str):
            for text in prompts:
                self.tokenizer.check_text(text)
            prompts = self._front.runtime.input_processor.tokenizer.encode(prompts)
        pairs = [(prompt, chunk) for prompt in prompts for chunk in _chunks(labels)]
        # The continuation is one label. At its position all labels of a chunk are scored.
        return self._front.make_score_call(
            [prompt for prompt, _ in pairs],
            [chunk[:1] for _, chunk in pairs],
            [chunk for _, chunk in pairs],
            self.adapter,
        )

    async def _wait(self, call: Call) -> None:
        dispatch = self._front.runtime.dispatch
        with submitted(dispatch, call):
            await async_wait_all(dispatch, call, self._options.request_timeout)
        if (error := call.failure or cut_short(call)) is not None:
            raise error


def _chunks(labels: list[int]) -> list[list[int]]:
    return [list(chunk) for chunk in itertools.batched(labels, MAX_NAMED_IDS)]


def _softmax(row: list[float]) -> list[float]:
    most = max(row)
    each = [math.exp(value - most) for value in row]
    total = sum(each)
    return [value / total for value in each]
