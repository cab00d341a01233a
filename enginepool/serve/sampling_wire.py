"""Sampling parameters as clients of other servers write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginepool.errors import InvalidRequest
from enginepool.values import is_int, shown

_INT32, _INT64 = 1 << 31, 1 << 63
# Strings that end an output are looked for in every row after every step, in as much of the output
# as the longest of them takes.
_STOPS, _STOP_CHARACTERS = 256, 4096


def as_taken(params: Any) -> Any:
    """The same for one prompt, or a list of them: `top_k` of 0 is all, as vLLM's and Hugging Face's
    are, and a seed of up to 64 bits is folded into the 32 that an engine's has.

    Raises:
        InvalidRequest: A wider seed, or more `stop` than can be looked for.
    """
    if isinstance(params, list):
        return [as_taken(one) for one in params]
    if not isinstance(params, Mapping):
        return params
    taken = dict(params)
    _check_stop(taken.get("stop"))
    if is_int(taken.get("top_k")) and taken["top_k"] == 0:
        taken["top_k"] = -1
    if is_int(taken.get("sampling_seed")):
        taken["sampling_seed"] = _folded(taken["sampling_seed"])
    return taken


def _check_stop(stop: Any) -> None:
    stops = [one for one in (stop if isinstance(stop, list) else [stop]) if isinstance(one, str)]
    characters = sum(map(len, stops))
    if len(stops) > _STOPS or characters > _STOP_CHARACTERS:
        raise InvalidRequest(
            f"stop: {len(stops)} strings of {characters} characters: at most {_STOPS} are taken, "
            f"of {_STOP_CHARACTERS} characters together"
        )


def _folded(seed: int) -> int:
    if -_INT32 <= seed < _INT32:
        return seed
    if not -_INT64 <= seed < _INT64:
        raise InvalidRequest(f"seed={shown(seed)}: expected an integer of at most 64 bits")
    low = (seed ^ (seed >> 32)) % (1 << 32)
    return low - (1 << 32) if low >= _INT32 else low
