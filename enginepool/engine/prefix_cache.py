"""Upstream's prefix cache, as the scheduler uses it.

Reaches into upstream's prefix cache: its `evict` is replaced.

What breaks: Where the KV cache is full of old prompts, prefills and decode steps walk
over all leaves of the cache, to evict a few tokens.
Why: Upstream's `evict` collects and sorts the leaves anew, and frees no more than it is asked for.
Remove when: Upstream keeps its leaves in order.
"""

from __future__ import annotations

import weakref
from typing import Any

from sgl_jax.srt.mem_cache.radix_cache import RadixKey

try:  # 0.1.0rc0; 0.0.3rc99 takes the values themselves
    from sgl_jax.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
except ImportError:
    EvictParams = MatchPrefixParams = None

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


def cached_tokens(tree_cache: Any, ids: list[int], namespace: str | None) -> int:
    """How many of these tokens the cache has."""
    key: Any = RadixKey(ids, namespace, 0)
    params = key if MatchPrefixParams is None else MatchPrefixParams(key=key)
    return len(tree_cache.match_prefix(params).device_indices)
