"""Upstream's prefix cache, as the scheduler uses it.

Reaches into upstream's prefix cache and its KV allocator: `evict` is replaced.

What breaks: Where the KV cache is full of old prompts, prefills and decode steps walk
over all leaves of the cache, to evict a few tokens.
Why: Upstream's `evict` collects and sorts the leaves each time, and frees no more than asked for.
Remove when: Upstream keeps its leaves in order.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from sgl_jax.srt.mem_cache.radix_cache import RadixKey

try:  # 0.1.0rc0; 0.0.3rc99 takes the values themselves
    from sgl_jax.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
except ImportError:
    EvictParams = MatchPrefixParams = None

from enginepool.dispatch.routing import MIN_SHARED_PREFIX

if TYPE_CHECKING:
    from sgl_jax.srt.managers.scheduler import Scheduler

# An eviction frees at least 1 / _SHARE of the KV cache.
_SHARE = 32


def evict_more(tree_cache: Any, tokens: int) -> None:
    """Let the cache evict more at a time, and so less often.

    Args:
        tokens: How many the KV cache has.
    """
    # No cycle: the cache holds KV buffers, which are freed when the pool is closed.
    cache, evict, least = weakref.ref(tree_cache), type(tree_cache).evict, tokens // _SHARE

    def evict_params(params: Any) -> Any:
        swa = getattr(params, "swa_num_tokens", 0)
        if not swa:  # a pool for a sliding window is smaller
            params = type(params)(num_tokens=max(params.num_tokens, least), dp_rank=params.dp_rank)
        return evict(cache(), params)

    def evict_tokens(num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        if not args:
            num_tokens = max(num_tokens, least)
        return evict(cache(), num_tokens, *args, **kwargs)

    tree_cache.evict = evict_tokens if EvictParams is None else evict_params


def cached_prefix(scheduler: Scheduler, ids: list[int], namespace: str | None) -> int:
    """How many of a prompt's first tokens the cache has. Counts no further than routing needs."""
    page = scheduler.page_size
    enough = -(-MIN_SHARED_PREFIX // page) * page
    key: Any = RadixKey(ids[: min(enough, len(ids) - 1)], namespace, 0)
    params = key if MatchPrefixParams is None else MatchPrefixParams(key=key)
    return len(scheduler.tree_cache.match_prefix(params).device_indices)


def kv_usage(scheduler: Scheduler) -> tuple[int, int]:
    """Tokens of KV cache in use, and in all. Tokens that the cache may evict count as free."""
    allocator: Any = scheduler.token_to_kv_pool_allocator
    total = scheduler.max_total_num_tokens
    free = allocator.available_size(0) + scheduler.tree_cache.evictable_size(dp_rank=0)
    return total - free, total
