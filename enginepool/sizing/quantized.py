"""The sizes of the matrices that `quantization_config_path` quantizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from enginepool.errors import InvalidConfig
from enginepool.values import shown

_LINEAR = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


def itemsizes(path: str, layers: int) -> tuple[int | None, int | None]:
    """The bytes of an element of linear layers, and of experts; None if they are not quantized.

    Raises:
        InvalidConfig: There is no such file, or the sizes that its rules make are not known.
    """
    from sgl_jax.srt.configs.quantization_config import QuantizationConfig

    try:
        found: Any = QuantizationConfig.from_path(path)
        rules = [(re.compile(rule["module_path"]), rule) for rule in found.get_linear_rules()]
    except Exception as error:  # upstream, YAML and the patterns raise anything
        why = f"{type(error).__name__}: {error}"
        raise InvalidConfig(
            f"quantization_config_path={shown(path)}: cannot be read: {why}"
        ) from error
    if found.is_static_checkpoint or found.ignored_layers or found.weight_block_size:
        raise _not_counted(path)
    modules = [
        f"model/layers[{layer}]/{part}/{name}"
        for layer in range(layers)
        for part, names in _LINEAR.items()
        for name in names
    ]
    first = [next((rule for pattern, rule in rules if pattern.match(m)), None) for m in modules]
    sizes = {rule and _itemsize(rule) for rule in first}
    if len(sizes) != 1 or 0 in sizes:
        raise _not_counted(path)
    experts = found.get_moe_weight_dtype()
    return sizes.pop(), None if experts is None else np.dtype(experts).itemsize


def _itemsize(rule: Mapping[str, Any]) -> int:
    """Bytes of an element; 0 if scales are in blocks or the dtype is unknown."""
    from sgl_jax.srt.configs.quantization_config import DTYPE_MAP

    # Upstream takes Qwix's name of the field, too.
    dtype = DTYPE_MAP.get(rule.get("weight_dtype", rule.get("weight_qtype")))
    known = dtype is not None and not rule.get("weight_block_size")
    return np.dtype(dtype).itemsize if known else 0


def _not_counted(path: str) -> InvalidConfig:
    return InvalidConfig(
        f"quantization_config_path={shown(path)}: expected rules that quantize all linear layers "
        "alike, without blocks"
    )
