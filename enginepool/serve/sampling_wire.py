"""Sampling parameters as clients of other servers write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginepool.errors import InvalidRequest
from enginepool.values import is_int, shown

_INT32, _INT64 = 1 << 31, 1 << 63


def as_taken(params: Any) -> Any:
    """The same for one prompt, or a list of them: `top_k` of 0 is all, as vLLM's and Hugging Face's
    are, and a seed of up to 64 bits is folded into the 32 that an engine's has.

    Raises:
        InvalidRequest: A wider seed.
    """
    if isinstance(params, list):
        return [as_taken(one) for one in params]
    if not isinstance(params, Mapping):
        return params
    taken = dict(params)
    if is_int(taken.get("top_k")) and taken["top_k"] == 0:
        taken["top_k"] = -1
    if is_int(taken.get("sampling_seed")):
        taken["sampling_seed"] = _folded(taken["sampling_seed"])
    return taken


def _folded(seed: int) -> int:
    if -_INT32 <= seed < _INT32:
        return seed
    if not -_INT64 <= seed < _INT64:
        raise InvalidRequest(f"seed={shown(seed)}: expected an integer of at most 64 bits")
    low = (seed ^ (seed >> 32)) % (1 << 32)
    return low - (1 << 32) if low >= _INT32 else low
