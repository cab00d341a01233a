"""Sampling parameters as clients of other servers write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginepool.dispatch.grammar import KINDS
from enginepool.errors import InvalidRequest
from enginepool.frontend.sampling import NAMES
from enginepool.serve.default_only import is_empty, without_defaults
from enginepool.values import described, is_int, shown

_INT32, _INT64 = 1 << 31, 1 << 63
# After every step each row's text is searched for its stop strings.
_STOPS, _STOP_CHARACTERS = 256, 4096


def translate_params(params: Any) -> Any:
    """Sampling parameters as a pool takes them, for one prompt or a list.

    `top_k` of 0 means all, as in vLLM and Hugging Face. A seed of up to 64 bits is folded into the
    32 bits of an engine's.

    Raises:
        InvalidRequest: A seed is wider, there are too many `stop` strings, or a name in
            `custom_params` is no sampling parameter or is given twice.
    """
    if isinstance(params, list):
        return [translate_params(one) for one in params]
    if not isinstance(params, Mapping):
        return params
    taken = without_defaults(_with_custom(params), NAMES)
    _check_stop(taken.get("stop"))
    if is_int(taken.get("top_k")) and taken["top_k"] == 0:
        taken["top_k"] = -1
    if is_int(taken.get("sampling_seed")):
        taken["sampling_seed"] = _folded(taken["sampling_seed"])
    return taken


def has_grammar(params: Any) -> bool:
    """Whether the sampling parameters of a prompt, or of any of several prompts, have a grammar."""
    each = params if isinstance(params, list) else [params]
    return any(kind in one for one in each if isinstance(one, dict) for kind in KINDS)


def _with_custom(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters, merged with those in sglang's `custom_params`, which slime sends."""
    taken = dict(params)
    custom = taken.pop("custom_params", None)
    if not isinstance(custom, Mapping):
        return taken if custom is None else {**taken, "custom_params": custom}
    for name, value in custom.items():
        if name not in NAMES and not is_empty(value):
            raise InvalidRequest(
                f"custom_params.{name}={described(value)}: custom_params may only hold "
                "sampling parameters"
            )
        if value is not None and taken.get(name) not in (None, value):
            raise InvalidRequest(
                f"custom_params.{name}={described(value)} and {name}={described(taken[name])}: "
                "give one of them"
            )
    return taken | {k: v for k, v in custom.items() if k in NAMES and v is not None}


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
