"""The block table of a decode batch: which KV pages each row has.

Reaches into upstream's allocator and its table of requests.

What breaks: Nothing by itself. But if every step needs a slot from upstream's allocator, every step
waits for the host.
Why: Upstream allocates for one step at a time.
Remove when: With `program.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from sgl_jax.srt.mem_cache.common import evict_from_tree_cache

if TYPE_CHECKING:
    from sgl_jax.srt.managers.schedule_batch import Req
    from sgl_jax.srt.managers.scheduler import Scheduler


class BlockTable:
    """The KV pages of one batch. Pages for several steps are allocated at once.

    Attributes:
        pages: By row: its pages. Entries after these are not read.
    """

    def __init__(self, scheduler: Scheduler, rows: int) -> None:
        allocator, req_to_token = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
        assert allocator is not None
        assert req_to_token is not None
        self._allocator, self._req_to_token = allocator, req_to_token.req_to_token
        self._tree_cache = scheduler.tree_cache
        self._size = scheduler.page_size
        self.pages = np.zeros((rows, self.width(scheduler)), np.int32)
        # By row: its place in upstream's table of slots, how many of its slots are written there,
        # how many pages it has.
        self._places = np.zeros(rows, np.int64)
        self._written = np.zeros(rows, np.int64)
        self._counts = np.zeros(rows, np.int64)

    @staticmethod
    def width(scheduler: Scheduler) -> int:
        """How many pages the longest request has."""
        return -(-scheduler.max_req_len // scheduler.page_size)

    def add_rows(self, rows: list[int], reqs: list[Req]) -> None:
        """Take over the pages that upstream has allocated for these requests."""
        size = self._size
        lengths = np.array([req.kv_allocated_len for req in reqs])
        places = np.array([req.req_pool_idx for req in reqs])
        counts = -(-lengths // size)
        used = int(counts.max(initial=0))
        self.pages[rows, :used] = self._req_to_token[places, : used * size : size] // size
        self._places[rows], self._written[rows], self._counts[rows] = places, lengths, counts

    def refresh(self, rows: list[int]) -> bool:
        """Take over what upstream has written for these requests since their rows were added.
        Returns whether anything is different."""
        size, changed = self._size, False
        for row in rows:
            used = -(-self._written[row] // size)
            slots = self._req_to_token[self._places[row], : used * size : size]
            pages = self.pages[row, :used]
            if not np.array_equal(pages, slots // size):
                pages[:], changed = slots // size, True
        return changed

    def allocate(self, rows: np.ndarray, lengths: np.ndarray, *, evict: bool) -> bool | None:
        """Allocate the pages that these rows still need for this many tokens.

        Args:
            evict: The prefix cache may evict for it.

        Returns:
            Whether `pages` has changed. None if there are not enough pages: nothing is allocated.
        """
        wanted = np.maximum(-(-lengths // self._size) - self._counts[rows], 0)
        total = int(wanted.sum())
        if total == 0:
            return False
        if evict:
            evict_from_tree_cache(self._tree_cache, total * self._size)
        slots = self._allocator.alloc(total * self._size)
        if slots is None:
            return None
        nth = np.arange(total) - np.repeat(np.cumsum(wanted) - wanted, wanted)
        row = np.repeat(rows, wanted)
        self.pages[row, self._counts[row] + nth] = slots[:: self._size] // self._size
        self._counts[rows] += wanted
        return True

    def write_back(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Write the slots of this many tokens to upstream's table, and free the pages beyond."""
        size, new = self._size, np.maximum(lengths - self._written[rows], 0)
        row = np.repeat(rows, new)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(new) - new, new)
        token = self._written[row] + nth
        slots = self.pages[row, token // size] * size + token % size
        self._req_to_token[self._places[row], token] = slots
        used = -(-lengths // size)
        page = np.arange(self.pages.shape[1])
        beyond = (page >= used[:, None]) & (page < self._counts[rows, None])
        if beyond.any():
            rest = self.pages[rows][beyond]
            self._allocator.free((rest[:, None] * size + np.arange(size)).reshape(-1))
        self._written[rows], self._counts[rows] = lengths, used
