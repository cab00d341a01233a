"""The prompts that an engine scores between its steps.

Upstream's scheduler does not know them. A prompt takes pages of the engine's own KV cache when its
scoring begins, and gives them back when it ends. It does not use the prefix cache. When running
requests need pages, prompts that are being scored give theirs back, and start over later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import numpy as np
from sgl_jax.srt.mem_cache.common import evict_from_tree_cache

from enginepool.dispatch.condition import WeightsCondition
from enginepool.dispatch.request import Request
from enginepool.dispatch.scoring import Scored, Scoring
from enginepool.engine.prefill_program import PrefillPiece, PrefillProgram, Values
from enginepool.lora.adapter import Adapter

if TYPE_CHECKING:
    from sgl_jax.srt.managers.scheduler import Scheduler
    from sgl_jax.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator

_Complete = tuple[list[Request], Scored]


class _Prompt:
    """A prompt that is scored or waits to be, and the requests that wait for the result."""

    def __init__(self, request: Request, scoring: Scoring) -> None:
        self.ids, self.scoring, self.requests = request.input_ids, scoring, [request]
        self.slots: np.ndarray | None = None
        self.begin_anew()

    @property
    def length(self) -> int:
        """How many tokens are computed: all but the last, which no token follows."""
        return len(self.ids) - 1

    @property
    def complete(self) -> bool:
        return self.computed == self.length

    def begin_anew(self) -> None:
        self.computed = 0
        self.version: int | str = 0
        self.update: int | None = None
        self.adapter: Adapter | None = self.requests[0].adapter
        first = self.scoring.start == 0
        self.logprobs: list[float | None] = [None] if first else []
        self.top_logprobs: list[tuple[list[float], list[int]] | None] = [None] if first else []
        self.named_logprobs: list[list[float] | None] = [None] if first else []

    def next_piece(self, room: int, page: int) -> PrefillPiece | None:
        """The next tokens, as many as fit: whole pages, except at the prompt's end."""
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
        ids = self.ids[self.computed : end]
        return PrefillPiece(ids, self.computed, slots, targets, named, self.adapter)

    def take(self, piece: PrefillPiece, values: Values) -> None:
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
            self.logprobs,
            self.top_logprobs,
            self.named_logprobs,
            self.version,
            self.update,
            self.adapter,
        )


class Scorer:
    """The prompts that one engine scores. Used on the engine's thread only.

    A request that was taken stays here until `step` returns it, `cannot_hold` ends it, or `drop` or
    `forget` drops it.

    Args:
        scheduler: The engine's scheduler. Prompts use its KV cache.
        has_work: Whether a step would do something.
        cannot_hold: Ends a request whose prompt does not fit an empty KV cache.

    Attributes:
        waits_for_room: The next prompt waits for KV cache of running requests or begun prompts.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        program: PrefillProgram,
        weights: WeightsCondition,
        *,
        has_work: Callable[[], bool],
        cannot_hold: Callable[[Request], None],
    ) -> None:
        self.program = program
        self.waits_for_room = False
        self._scheduler, self._weights = scheduler, weights
        self._has_work, self._cannot_hold = has_work, cannot_hold
        self._waiting: deque[_Prompt] = deque()
        self._begun: list[_Prompt] = []

    @property
    def holds_kv(self) -> bool:
        return bool(self._begun)

    @property
    def has_prompts(self) -> bool:
        """Whether any prompt is here, begun or not."""
        return bool(self._begun or self._waiting)

    def take(self, request: Request) -> bool:
        """Take a request if its prompt is to be scored first. Returns whether it was taken.

        If the scores are known already, the request gets them and is not taken.
        """
        scoring = request.scoring
        if scoring is None or request.scored is not None:
            return False
        latest, mine = scoring.latest, request.adapter
        if latest is not None and latest.update == self._weights.update and latest.adapter is mine:
            request.scored = latest
            return False
        prompt = _Prompt(request, scoring)
        if prompt.complete:  # a single token, which follows nothing
            prompt.version, prompt.update = self._weights.version, self._weights.update
            request.scored = prompt.result()
            return False
        for other in (*self._begun, *self._waiting):
            if other.scoring is scoring and other.requests[0].adapter is request.adapter:
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
            elif self._begun or self._has_work():
                self.waits_for_room = True
                break
            else:  # it does not fit an empty KV cache, which is small with a sliding window
                self._waiting.popleft()
                for request in prompt.requests:
                    self._cannot_hold(request)
        return bool(self._begun)

    def step(
        self, wait: Callable[[jax.Array], None]
    ) -> tuple[list[_Complete], list[Request], bool]:
        """Compute as much as one run of the program can take.

        Args:
            wait: Waits until the results are there.

        Returns:
            The prompts that are complete, the requests that got a log-probability that is not
            finite, and whether only one prompt was computed.
        """
        pieces: list[PrefillPiece] = []
        room, slots = self.program.tokens, self.program.slots
        weights = self._weights
        for prompt in self._begun[: self.program.sequences]:
            new_adapter = prompt.adapter is not prompt.requests[0].adapter
            if prompt.update != weights.update or new_adapter:
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
        """Free pages until running requests can have this many."""
        while self._begun and self._free() < pages * self.program.page_size:
            prompt = self._begun.pop()
            self._give_back(prompt)
            prompt.begin_anew()
            self._waiting.appendleft(prompt)

    def drop(self, internal_rid: str) -> bool:
        """Drop a request that is aborted; False if it is not here."""
        for prompts in (self._begun, self._waiting):
            for prompt in prompts:
                for request in prompt.requests:
                    if request.internal_rid == internal_rid:
                        prompt.requests.remove(request)
                        if not prompt.requests:
                            prompts.remove(prompt)
                            self._give_back(prompt)
                            self.waits_for_room &= bool(self._waiting)
                        return True
        return False

    def forget(self) -> None:
        """Drop every prompt. The caller resets the KV cache's allocator next."""
        self._waiting.clear()
        self._begun.clear()
        self.waits_for_room = False

    def _has_room(self) -> bool:
        """Whether the next run has room for one more prompt. Only then does a prompt get KV
        cache."""
        tokens = sum(prompt.length - prompt.computed for prompt in self._begun)
        return len(self._begun) < self.program.sequences and tokens < self.program.tokens

    def _begin(self, prompt: _Prompt) -> bool:
        """Take the prompt's KV cache, if running requests keep enough for their next step, and a
        prompt in chunks for its rest."""
        scheduler, page = self._scheduler, self.program.page_size
        needed = _whole_pages(prompt.length, page)
        kept = running_count(scheduler) * page + _whole_pages(_rest_in_chunks(scheduler), page)
        if self._free() < needed + kept:
            return False
        evict_from_tree_cache(scheduler.tree_cache, needed)
        prompt.slots = self._allocator().alloc(needed)
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
            self._allocator().free(prompt.slots)
            prompt.slots = None
            for info in self._scheduler.running_batch.reqs_info:
                info.batch_is_full = False  # else upstream looks for room when a request ends

    def _free(self) -> int:
        evictable = self._scheduler.tree_cache.evictable_size(dp_rank=0)
        return self._allocator().available_size(0) + evictable

    def _allocator(self) -> BaseTokenToKVPoolAllocator:
        allocator = self._scheduler.token_to_kv_pool_allocator
        assert allocator is not None  # upstream's constructor has made it
        return allocator


def running_count(scheduler: Scheduler) -> int:
    """How many requests take KV cache at the next step."""
    return sum(len(info.reqs or ()) for info in scheduler.running_batch.reqs_info)


def _rest_in_chunks(scheduler: Scheduler) -> int:
    """How many tokens of a prompt that is prefilled in chunks have no KV cache yet."""
    reqs = [req for req in scheduler.chunked_reqs if req is not None]
    return sum(len(req.origin_input_ids) + len(req.output_ids) - len(req.fill_ids) for req in reqs)


def _whole_pages(tokens: int, page: int) -> int:
    return -(-tokens // page) * page
