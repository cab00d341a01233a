"""The size of an engine's KV cache on a TPU, as a share of the chip's memory.

On a CPU it is `max_total_tokens`, by default that of `config.py`. On a GPU upstream decides it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from enginepool.sizing.memory import Memory
from enginepool.sizing.settings import FRACTION, Settings
from enginepool.sizing.shape import Shape

# The default fraction leaves room for a second weight set, if KV cache for this many requests of
# the whole context remains.
KV_FOR_REQUESTS = 16


def default_fraction(shape: Shape, args: Mapping[str, Any], free: int) -> float:
    """`mem_fraction_static` if the user gave none.

    It is the largest at which a second weight set fits beside the KV cache, temporaries and
    programs, if that leaves KV cache for 16 requests of the context. Otherwise it is the largest
    that leaves room for temporaries and programs. It is never more than upstream's.

    Args:
        args: `ServerArgs` as the pool passes them, with the page size.
        free: Bytes of HBM that the engine finds on each of its chips.
    """
    settings = replace(Settings.of(args, shape), fraction=FRACTION)
    memory = Memory(shape, settings, free)
    alone, live = memory.largest_fraction(sets=1), memory.live_swap_fraction
    most = min(FRACTION, FRACTION if alone is None else alone)
    wanted = KV_FOR_REQUESTS * settings.tokens_per_request
    if settings.max_total_tokens is not None:
        wanted = min(wanted, memory.tokens_at(most))
    if live is not None and memory.tokens_at(live) >= wanted:
        return min(live, FRACTION)
    return most
