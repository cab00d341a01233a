"""Computes rotary frequencies by their published definitions. Engines are compared with them.

- RoPE: Su et al., "RoFormer", arXiv:2104.09864, section 3.2.2.
- "llama3": the model card and the reference code of Llama 3.1 (`apply_scaling`).
- "yarn": Peng et al., "YaRN", arXiv:2309.00071: NTK-by-parts (section 3.2), and the temperature of
  attention (section 3.4), multiplied into cosines and sines.

The frequencies are in float64. A test compares them with those of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from enginepool.errors import InvalidConfig
from enginepool.model_config.config_json import as_read
from enginepool.values import is_number, shown

# The kinds that upstream computes with our patches.
COMPUTED = ("default", "llama3", "yarn")
_BEFORE = "original_max_position_embeddings"
_NUMBERS = (
    *("rope_theta", "factor", _BEFORE, "low_freq_factor", "high_freq_factor", "beta_fast"),
    *("beta_slow", "attention_factor", "mscale", "mscale_all_dim", "partial_rotary_factor"),
)


class Rotation(NamedTuple):
    """The rotation of a layer's queries and keys.

    Attributes:
        frequencies: Radians for each position, [rotated entries of a head / 2].
        scale: Multiplied into cosines and sines.
    """

    frequencies: np.ndarray
    scale: float


def rotation(config: Mapping[str, Any], layer: int = 0) -> Rotation:
    """The rotation that a config.json of transformers 4 or 5 gives a layer.

    Raises:
        InvalidConfig: The engines do not compute this kind of scaling. It lacks a parameter, or a
            parameter is no number.
    """
    config = as_read(config)
    field, rope = _parameters(config, layer)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in COMPUTED:
        raise InvalidConfig(
            f"config.json: {field} has rope_type={shown(kind)}, which no engine computes; "
            f"expected one of {', '.join(COMPUTED)}"
        )
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    _check_numbers(field, {**rope, "rope_theta": theta})
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    dim = int(dim * (rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1))
    plain = theta ** (-np.arange(0, dim, 2) / dim)
    if kind == "default":
        return Rotation(plain, 1.0)
    before = rope.get(_BEFORE) or config["max_position_embeddings"]
    if config.get(_BEFORE) not in (None, before):
        raise InvalidConfig(
            f"config.json: {_BEFORE}={shown(config[_BEFORE])}, but {field} has {before}: versions "
            f"of transformers read different ones; write the right number into {field}"
        )
    try:
        if kind == "llama3":
            return Rotation(plain * _llama3(plain, rope, before), 1.0)
        weight = _interpolation(theta, dim, rope, before)
        scaled = plain * (1 - weight + weight / rope["factor"])
        return Rotation(scaled, _temperature(rope, rope["factor"]))
    except KeyError as error:
        raise InvalidConfig(f"config.json: {field} of rope_type={kind!r} lacks {error}") from error


def _check_numbers(field: str, rope: Mapping[str, Any]) -> None:
    for name in _NUMBERS:
        value = rope.get(name)
        if value is not None and not (is_number(value) and (value > 0 or name != "factor")):
            where = "" if name == "rope_theta" else f" of {field}"
            raise InvalidConfig(
                f"config.json: {name}={shown(value)}{where}: expected a number above 0"
            )


def _parameters(config: Mapping[str, Any], layer: int) -> tuple[str, Mapping[str, Any]]:
    """A layer's rotary parameters, and the field that has them. Parameters that differ by layer
    type are in the field of transformers 5."""
    by_type = config.get("rope_parameters")
    if not by_type:
        return "rope_scaling", config.get("rope_scaling") or {}
    kinds = config.get("layer_types") or []
    if layer >= len(kinds) or kinds[layer] not in by_type:
        raise InvalidConfig(
            f"config.json: rope_parameters has {', '.join(by_type)}, and layer_types names none of "
            f"them for layer {layer}"
        )
    return f"rope_parameters[{kinds[layer]!r}]", by_type[kinds[layer]] or {}


def _llama3(plain: np.ndarray, rope: Mapping[str, Any], before: int) -> np.ndarray:
    """The factor of each frequency. It depends on how often its wave fits into the original
    context: 1 for short waves, 1 / factor for long ones."""
    fits = before * plain / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((fits - low) / (high - low), 0, 1) if high != low else fits > high
    return kept + (1 - kept) / rope["factor"]


def _interpolation(theta: float, dim: int, rope: Mapping[str, Any], before: int) -> np.ndarray:
    """How much each frequency is interpolated: 0 if its wave makes `beta_fast` turns or more in the
    original context, 1 if it makes `beta_slow` turns or fewer, and linear by index between these.
    """
    first, last = (
        dim * math.log(before / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1)
    )
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    return np.clip((np.arange(dim // 2) - first) / max(last - first, 0.001), 0, 1)


def _temperature(rope: Mapping[str, Any], factor: float) -> float:
    def of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return of(rope["mscale"]) / of(rope["mscale_all_dim"])
    return of(1.0)
