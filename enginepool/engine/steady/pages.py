"""The KV pages of a flight: which a row has, more of them taken ahead, the rest given back.

Reaches into upstream's allocator and its table of requests.

What breaks: Nothing by itself. A batch that takes one slot a step from upstream's allocator comes
back to the host for it at every step.
Why: Upstream allocates for the step at hand.
Remove when: With `program.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sgl_jax.srt.mem_cache.common import evict_from_tree_cache


class Pages:
    """Of the rows of one flight.

    Attributes:
        table: By row: its pages; what follows them is not looked at.
    """

    def __init__(self, scheduler: Any, rows: int) -> None:
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._tree_cache = scheduler.tree_cache
        self._req_to_token = scheduler.req_to_token_pool.req_to_token
        self._size = scheduler.page_size
        self.table = np.zeros((rows, self.width(scheduler)), np.int32)
        # By row: where upstream keeps its slots, tokens of which upstream knows them, its pages.
        self._slots = np.zeros(rows, np.int64)
        self._settled = np.zeros(rows, np.int64)
        self._counts = np.zeros(rows, np.int64)

    @staticmethod
    def width(scheduler: Any) -> int:
        """Pages of the longest request that an engine takes."""
        return -(-scheduler.max_req_len // scheduler.page_size)

    def seat(self, rows: list[int], reqs: list[Any]) -> None:
        """These rows have the pages that upstream has allocated for their requests."""
        size = self._size
        lengths = np.array([req.kv_allocated_len for req in reqs])
        slots = np.array([req.req_pool_idx for req in reqs])
        counts = -(-lengths // size)
        used = int(counts.max(initial=0))
        self.table[rows, :used] = self._req_to_token[slots, : used * size : size] // size
        self._slots[rows], self._settled[rows], self._counts[rows] = slots, lengths, counts

    def cover(self, rows: np.ndarray, lengths: np.ndarray, *, evict: bool) -> bool | None:
        """Let these rows have pages for so many tokens.

        Args:
            evict: The prefix cache gives up what is missing.

        Returns:
            Whether the table has changed; None, with nothing done, if there are not enough pages.
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
        self.table[row, self._counts[row] + nth] = slots[:: self._size] // self._size
        self._counts[rows] += wanted
        return True

    def settle(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """These rows have so many tokens and get no more from here: upstream finds their slots
        where it looks for them, and the pages beyond are free again."""
        size, new = self._size, np.maximum(lengths - self._settled[rows], 0)
        row = np.repeat(rows, new)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(new) - new, new)
        places = self._settled[row] + nth
        slots = self.table[row, places // size] * size + places % size
        self._req_to_token[self._slots[row], places] = slots
        used = -(-lengths // size)
        page = np.arange(self.table.shape[1])
        beyond = (page >= used[:, None]) & (page < self._counts[rows, None])
        if beyond.any():
            rest = self.table[rows][beyond]
            self._allocator.free((rest[:, None] * size + np.arange(size)).reshape(-1))
        self._settled[rows], self._counts[rows] = lengths, used
