"""The prompts that an engine scores, between its steps.

They wait beside upstream's requests and never join them. A prompt's KV cache lies in pages of the
engine's own pool, taken when its turn comes and given back when it is scored; the prefix cache
neither has nor gets any of it. Where running requests need pages, those of scored prompts are
given back first, and the prompt begins anew later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from sgl_jax.srt.mem_cache.common import evict_from_tree_cache

from enginepool.dispatch.condition import WeightsCondition
from enginepool.dispatch.request import Request
from enginepool.dispatch.scoring import Scored, Scoring
from enginepool.engine.score_program import Piece, ScoreProgram, Values


class KVScheduler(Protocol):
    """What a scorer needs of the scheduler whose KV cache it shares."""

    tp_worker: Any
    tree_cache: Any
    token_to_kv_pool_allocator: Any

    def running_count(self) -> int:
        """How many requests take KV cache at the next step."""
        ...

    def has_work(self) -> bool:
        """Whether a step would do something."""
        ...

    def cannot_hold(self, request: Request) -> None:
        """End a request for whose prompt an empty KV cache has no room."""


_Complete = tuple[list[Request], Scored]


class _Prompt:
    """One prompt on its way, and the requests that wait for it."""

    def __init__(self, request: Request, scoring: Scoring) -> None:
        self.ids, self.scoring, self.requests = request.input_ids, scoring, [request]
        self.slots: np.ndarray | None = None
        self.begin_anew()

    @property
    def length(self) -> int:
        """How many tokens are computed: nothing follows the last."""
        return len(self.ids) - 1

    @property
    def complete(self) -> bool:
        return self.computed == self.length

    def begin_anew(self) -> None:
        self.computed = 0
        self.version: int | str = 0
        self.update: int | None = None
        first = self.scoring.start == 0
        self.logprobs: list[float | None] = [None] if first else []
        self.top_logprobs: list[tuple[list[float], list[int]] | None] = [None] if first else []
        self.named_logprobs: list[list[float] | None] = [None] if first else []

    def next_piece(self, room: int, page: int) -> Piece | None:
        """As much as fits, in whole pages unless it is the end."""
        count = min(room, self.length - self.computed)
        end = self.computed + count
        if end < self.length:
            end -= end % page
        if end <= self.computed:
            return None
        assert self.slots is not None
        targets = self.ids[max(self.computed + 1, self.scoring.start) : end + 1]
        slots = self.slots[: _whole_pages(end, page)]
        named = self.scoring.named_ids
        return Piece(self.ids[self.computed : end], self.computed, slots, targets, named)

    def take(self, piece: Piece, values: Values) -> None:
        self.computed += len(piece.ids)
        self.logprobs += values.logprobs.tolist()
        if (k := self.scoring.top_logprobs_num) and values.top_values is not None:
            assert values.top_ids is not None
            best = zip(values.top_values[:, :k], values.top_ids[:, :k], strict=True)
            self.top_logprobs += [(row.tolist(), ids.tolist()) for row, ids in best]
        if piece.named:
            assert values.named is not None
            self.named_logprobs += values.named[:, : len(piece.named)].tolist()

    def result(self) -> Scored:
        assert self.update is not None
        return Scored(
            self.logprobs, self.top_logprobs, self.named_logprobs, self.version, self.update
        )


class Scorer:
    """Everything on the engine's thread.

    A request that it takes comes back by `step`, `drop` or `forget`, or ends by `cannot_hold`.

    Attributes:
        program: What computes.
        waits_for_room: The next prompt waits until running requests give back KV cache.
    """

    def __init__(self, scheduler: KVScheduler, weights: WeightsCondition) -> None:
        self.program = ScoreProgram(scheduler.tp_worker.worker)
        self.waits_for_room = False
        self._scheduler, self._weights = scheduler, weights
        self._waiting: deque[_Prompt] = deque()
        self._begun: list[_Prompt] = []

    @property
    def holds_kv(self) -> bool:
        return bool(self._begun)

    @property
    def has_prompts(self) -> bool:
        """Whether any is here, begun or not."""
        return bool(self._begun or self._waiting)

    def takes(self, request: Request) -> bool:
        """Whether the request's prompt is to be scored first."""
        scoring = request.scoring
        if scoring is None or request.scored is not None:
            return False
        latest = scoring.latest
        if latest is not None and latest.update == self._weights.update:
            request.scored = latest
            return False
        prompt = _Prompt(request, scoring)
        if prompt.complete:  # a single token, which follows nothing
            prompt.version, prompt.update = self._weights.version, self._weights.update
            request.scored = prompt.result()
            return False
        for other in (*self._begun, *self._waiting):
            if other.scoring is scoring:
                other.requests.append(request)
                return True
        self._waiting.append(prompt)
        return True

    def ready(self) -> bool:
        """Whether `step` would compute something."""
        self.waits_for_room = False
        while self._waiting and self._has_room():
            prompt = self._waiting[0]
            if self._begin(prompt):
                self._begun.append(self._waiting.popleft())
            elif self._begun or self._scheduler.has_work():
                self.waits_for_room = True
                break
            else:  # all is free and it is not enough: a pool for a sliding window is smaller
                self._waiting.popleft()
                for request in prompt.requests:
                    self._scheduler.cannot_hold(request)
        return bool(self._begun)

    def step(self, wait: Callable[[Any], None]) -> tuple[list[_Complete], list[Request], bool]:
        """Compute as much as fits one run of the program.

        Args:
            wait: Called with the results, until they are there.

        Returns:
            What is complete, requests that got a log-probability that is no finite number, and
            whether it was one prompt alone.
        """
        pieces: list[Piece] = []
        room, slots = self.program.tokens, self.program.slots
        weights = self._weights
        for prompt in self._begun[: self.program.sequences]:
            if prompt.update != weights.update:  # new ones were put in place meanwhile
                prompt.begin_anew()
                prompt.version, prompt.update = weights.version, weights.update
            piece = prompt.next_piece(room, self.program.page_size)
            if piece is None or len(piece.slots) > slots:
                break
            pieces.append(piece)
            room, slots = room - len(piece.ids), slots - len(piece.slots)
        taken = self._begun[: len(pieces)]
        top = any(prompt.scoring.top_logprobs_num for prompt in taken)
        results = self.program.run(pieces, top=top)
        wait(results[0])
        values = self.program.fetch(pieces, results, top=top)
        broken: list[Request] = []
        for prompt, piece, value in zip(taken, pieces, values, strict=True):
            prompt.take(piece, value)
            if not np.isfinite(value.logprobs).all():
                broken += prompt.requests
                self._remove(prompt)
        complete = [prompt for prompt in self._begun if prompt.complete]
        return [self._finish(prompt) for prompt in complete], broken, len(pieces) == 1

    def make_way(self, pages: int) -> None:
        """See to it that running requests find so many pages of KV cache."""
        while self._begun and self._free() < pages * self.program.page_size:
            prompt = self._begun.pop()
            self._give_back(prompt)
            prompt.begin_anew()
            self._waiting.appendleft(prompt)

    def drop(self, internal_rid: str) -> bool:
        """Let go of a request that is aborted; False if it is not here."""
        for prompts in (self._begun, self._waiting):
            for prompt in prompts:
                for request in prompt.requests:
                    if request.internal_rid == internal_rid:
                        prompt.requests.remove(request)
                        if not prompt.requests:
                            prompts.remove(prompt)
                            self._give_back(prompt)
                        return True
        return False

    def forget(self) -> None:
        """Let go of everything; whoever calls this resets the KV cache's books next."""
        self._waiting.clear()
        self._begun.clear()
        self.waits_for_room = False

    def _has_room(self) -> bool:
        """Whether the program has room for one more prompt; KV cache is not taken long before."""
        tokens = sum(prompt.length - prompt.computed for prompt in self._begun)
        return len(self._begun) < self.program.sequences and tokens < self.program.tokens

    def _begin(self, prompt: _Prompt) -> bool:
        """Take its KV cache, if running requests keep enough for their next step."""
        scheduler, page = self._scheduler, self.program.page_size
        needed = _whole_pages(prompt.length, page)
        if self._free() < needed + scheduler.running_count() * page:
            return False
        evict_from_tree_cache(scheduler.tree_cache, needed)
        prompt.slots = scheduler.token_to_kv_pool_allocator.alloc(needed)
        return prompt.slots is not None

    def _finish(self, prompt: _Prompt) -> _Complete:
        self._remove(prompt)
        prompt.scoring.latest = scored = prompt.result()
        return prompt.requests, scored

    def _remove(self, prompt: _Prompt) -> None:
        self._begun.remove(prompt)
        self._give_back(prompt)

    def _give_back(self, prompt: _Prompt) -> None:
        if prompt.slots is not None:
            self._scheduler.token_to_kv_pool_allocator.free(prompt.slots)
            prompt.slots = None

    def _free(self) -> int:
        scheduler = self._scheduler
        evictable = scheduler.tree_cache.evictable_size(dp_rank=0)
        return scheduler.token_to_kv_pool_allocator.available_size(0) + evictable


def _whole_pages(tokens: int, page: int) -> int:
    return -(-tokens // page) * page
