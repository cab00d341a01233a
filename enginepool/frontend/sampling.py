"""Checks sampling parameters, and gives each sample a random stream of its own."""

from __future__ import annotations

import functools
import inspect
import itertools
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from enginepool.dispatch.grammar import KINDS, GrammarSource
from enginepool.errors import InvalidRequest
from enginepool.values import described, did_you_mean, flag, is_int, is_number, plain, shown

if TYPE_CHECKING:
    from sgl_jax.srt.sampling.sampling_params import SamplingParams

_INT32 = 1 << 31
_UINT32 = 1 << 32

# The ranges of upstream's `SamplingParams.verify`. Ours are narrower where upstream's cannot work.
_FLOATS: Mapping[str, tuple[float, float, str]] = {
    # Engines divide by it in float32. Near the largest number, 3e38, masked logits become NaN,
    # which resets engines. Above 1e6 all tokens are equally probable anyway.
    "temperature": (0.0, 1e30, "0 (greedy) or more, up to 1e30"),
    "top_p": (0.0, 1.0, "above 0 and at most 1"),
    "min_p": (0.0, 1.0, "between 0 and 1"),
    "frequency_penalty": (-2.0, 2.0, "between -2 and 2"),
    "presence_penalty": (-2.0, 2.0, "between -2 and 2"),
}
# The least `top_p` that engines get. It leaves the most probable token. A much smaller value is 0
# in float32 and leaves no token.
_LEAST_TOP_P = 1e-30
_COUNT = f"an integer, 1 or more, up to {_INT32 - 1}"
_INTS: Mapping[str, tuple[int, int, str]] = {
    "max_new_tokens": (0, _INT32 - 1, _COUNT),  # the input processor checks 0
    "min_new_tokens": (0, _INT32 - 1, f"an integer, 0 or more, up to {_INT32 - 1}"),
    "n": (1, 1 << 20, f"an integer, 1 or more, up to {1 << 20}"),
    "sampling_seed": (-_INT32, _INT32 - 1, "a 32-bit integer"),
    "stream_interval": (1, _INT32 - 1, _COUNT),
}
_IGNORED_BY_UPSTREAM = {"repetition_penalty": 1.0, "logit_bias": None}
_FLAGS = ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")
NAMES = (
    *_FLOATS,
    *_INTS,
    *_FLAGS,
    *KINDS,
    *_IGNORED_BY_UPSTREAM,
    "top_k",
    "stop",
    "stop_token_ids",
)


@dataclass(frozen=True)
class PromptSampling:
    """One prompt's parameters.

    Attributes:
        params: An object of upstream's `SamplingParams`, normalized and verified.
        seed: The caller's `sampling_seed`, or None.
        explicit_length: Whether the caller gave `max_new_tokens`.
        grammar: The grammar of outputs. It is not in `params`.
    """

    params: SamplingParams
    n: int
    seed: int | None
    explicit_length: bool
    grammar: GrammarSource | None = None


# Parameters of vLLM that are options of the call or have another name here.
_VLLM_NAMES = {
    "logprobs": "return_logprob=True and top_logprobs_num=, of the call",
    "prompt_logprobs": "return_prompt_logprob=True, of the call",
    "seed": "sampling_seed",
}


def make_sampling(
    params: Mapping[str, Any],
    *,
    vocab_size: int,
    tokenizer: Any,
    end_ids: Collection[int] = (),
    explicit: bool = True,
) -> PromptSampling:
    """Check one dict of sampling parameters and build upstream's object from it.

    Args:
        end_ids: The ids that end an output.

    Raises:
        InvalidRequest: A name is unknown (the error suggests the nearest). A value has the wrong
            type, is out of range or NaN. Or upstream accepts the parameter and ignores it.
    """
    from sgl_jax.srt.sampling.sampling_params import SamplingParams

    known = _parameters(SamplingParams)
    given = {}
    for name, value in params.items():
        if name not in known:
            hint = did_you_mean(name, known, elsewhere=_VLLM_NAMES)
            raise InvalidRequest(f"unknown sampling parameter {name}={described(value)}{hint}")
        if (value := plain(value)) is not None:
            _check_value(name, value, vocab_size)
            given[name] = max(value, _LEAST_TOP_P) if name == "top_p" else value
    grammar = _take_grammar(given)
    try:
        built = SamplingParams(**given)
        built.normalize(tokenizer)
        built.verify(vocab_size)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"sampling parameters {shown(given)}: {error}") from error
    stops = {*end_ids, *(built.stop_token_ids or ())}
    if built.min_new_tokens and len(stops) >= vocab_size:  # every logit would be masked
        raise InvalidRequest(
            f"min_new_tokens={built.min_new_tokens}: stop_token_ids and the model's end tokens are "
            f"all {vocab_size} tokens of the vocabulary, so no token may be sampled; leave one out"
        )
    return PromptSampling(
        built,
        built.n,
        given.get("sampling_seed"),
        explicit and "max_new_tokens" in given,
        grammar,
    )


@functools.cache
def _parameters(kind: type) -> list[str]:
    """The names of a constructor's parameters. Each request needs them."""
    return list(inspect.signature(kind.__init__).parameters)[1:]


def _take_grammar(given: dict[str, Any]) -> GrammarSource | None:
    """Remove the grammar from the parameters, since upstream must not see it, and return it.

    Raises:
        InvalidRequest: There are several grammars, or a parameter contradicts the grammar.
    """
    kinds = [kind for kind in KINDS if kind in given]
    if not kinds:
        return None
    if len(kinds) > 1:
        raise InvalidRequest(f"{' and '.join(kinds)}: an output has one grammar; give one of them")
    for name in ("ignore_eos", "min_new_tokens"):
        if given.get(name):
            raise InvalidRequest(
                f"{name}={shown(given[name])} with {kinds[0]}: after a complete output only the "
                "end token may be sampled; leave one of them out"
            )
    return GrammarSource.of(kinds[0], given.pop(kinds[0]))


def _check_value(name: str, value: Any, vocab_size: int) -> None:
    if name in _FLOATS:
        low, high, limits = _FLOATS[name]
        _require(is_number(value), name, value, f"a number {limits}")
        inside = low <= value <= high and (name != "top_p" or value > 0)
        _require(inside, name, value, limits)
    elif name in _INTS:
        low, high, limits = _INTS[name]
        _require(is_int(value) and low <= value <= high, name, value, limits)
    elif name in _FLAGS:
        flag(name, value)
    elif name == "top_k":
        inside = is_int(value) and (value == -1 or 1 <= value < _INT32)
        _require(inside, name, value, f"-1 (all) or {_COUNT}")
    elif name in _IGNORED_BY_UPSTREAM:
        _require(
            value == _IGNORED_BY_UPSTREAM[name] or value == {},
            name,
            value,
            f"nothing: sglang-jax accepts {name} and ignores it; leave it out",
        )
    elif name == "stop":
        strings = [value] if isinstance(value, str) else value
        ok = isinstance(strings, (list, tuple)) and all(isinstance(s, str) and s for s in strings)
        _require(ok, name, value, "a non-empty string or a list of them")
    elif name == "stop_token_ids":
        ok = isinstance(value, (list, tuple, set, frozenset)) and all(
            is_int(i) and 0 <= i < vocab_size for i in value
        )
        _require(ok, name, value, f"a list of token ids, each from 0 to {vocab_size - 1}")


def _require(condition: bool, name: str, value: Any, limits: str) -> None:
    if not condition:
        raise InvalidRequest(f"{name}={shown(value)}: expected {limits}")


def is_upstreams(params: object) -> TypeGuard[SamplingParams]:
    """Whether it is upstream's SamplingParams."""
    return hasattr(params, "convert_to_dict") and not isinstance(params, type)


def from_upstream(params: SamplingParams) -> dict[str, Any]:
    """The dict that upstream's object was made from, as far as the object shows it."""
    given = params.convert_to_dict()
    if is_int(given["top_k"]) and given["top_k"] > 1 << 29:  # upstream's "all"
        given["top_k"] = -1
    given.pop("stop_str_max_len", None)
    return given


class Seeds:
    """A random stream for each sample, whichever engine runs it.

    The patched sampler draws with one key a row, `fold_in(key(seed), position)`. If the caller
    gives a seed, a sample's stream depends on (seed, prompt index, sample index) only. Otherwise
    the pool counts its samples, and no two of the first 2**32 share a stream.
    """

    def __init__(self) -> None:
        self._base = secrets.randbits(32)
        self._count = itertools.count()

    def fresh(self) -> int:
        return _to_int32(_mix(self._base + next(self._count)))

    @staticmethod
    def derived(seed: int, prompt_index: int, sample_index: int) -> int:
        return _to_int32(_mix(_mix(seed) ^ _pair(prompt_index, sample_index)))

    @staticmethod
    def given(derived: int, prompt_index: int, sample_index: int) -> int:
        """The seed from which `derived` makes this one. A call with that seed repeats the
        sample."""
        return _to_int32(_unmix(_unmix(derived) ^ _pair(prompt_index, sample_index)))


def _pair(prompt_index: int, sample_index: int) -> int:
    # Cantor's pairing: no two samples of a call share a seed while prompt index + sample index
    # is below about 90,000.
    diagonal = prompt_index + sample_index
    return (diagonal * (diagonal + 1) // 2 + sample_index) % _UINT32


# The rounds of `_mix`: a xor-shift, then an odd factor.
_ROUNDS = ((16, 0x21F0AAAD), (15, 0x735A2D97))
_LAST_SHIFT = 15


def _mix(value: int) -> int:
    """A bijection of 32-bit integers without visible structure."""
    value %= _UINT32
    for shift, factor in _ROUNDS:
        value = ((value ^ (value >> shift)) * factor) % _UINT32
    return value ^ (value >> _LAST_SHIFT)


def _unmix(value: int) -> int:
    """The inverse of `_mix`."""
    value = _unshift(value % _UINT32, _LAST_SHIFT)
    for shift, factor in reversed(_ROUNDS):
        value = _unshift(value * pow(factor, -1, _UINT32) % _UINT32, shift)
    return value


def _unshift(value: int, shift: int) -> int:
    """The inverse of `value ^ (value >> shift)`, of 32 bits."""
    return value ^ (value >> shift) ^ (value >> 2 * shift)


def _to_int32(value: int) -> int:
    return value - _UINT32 if value >= _INT32 else value
