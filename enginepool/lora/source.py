"""Reads and checks the source of an adapter: a PEFT folder, or arrays by PEFT's names with the
fields of its adapter_config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from enginepool.errors import InvalidWeights
from enginepool.values import is_int, is_number, shown
from enginepool.weights.arrays import Array, as_array, convertible
from enginepool.weights.checkpoint import find
from enginepool.weights.files import TensorFile
from enginepool.weights.name_mismatch import listed

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"

# Fields of adapter_config.json that no engine computes, with the values that turn them off.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA", "lora", None),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, [], ()),
    "layer_replication": (None, [], ()),
    "target_parameters": (None, [], ()),
    "trainable_token_indices": (None, [], (), {}),
    "alora_invocation_tokens": (None, [], ()),
    "arrow_config": (None,),
}
# Values of `init_lora_weights` with which PEFT changes the base's weights.
_OTHER_BASE = ("pissa", "olora", "corda", "loftq")
_NAME = re.compile(
    r"^(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight$"
)


@dataclass(frozen=True)
class AdapterSource:
    """An adapter that fits a model.

    Attributes:
        config: The fields of adapter_config.json.
        scale: The factor of the product of B and A.
        arrays: A and B by the path of the model's linear layer.
    """

    config: Mapping[str, Any]
    scale: float
    arrays: Mapping[str, tuple[Array, Array]]


def read_adapter(
    source: Any,
    config: Mapping[str, Any] | None,
    paths: Mapping[str, str],
    layers: Mapping[str, tuple[int, int]],
    max_rank: int,
    *,
    download_dir: str | None = None,
) -> AdapterSource:
    """Read an adapter and check that an engine can hold it.

    Args:
        config: The fields of adapter_config.json. None for a folder, which has its own.
        paths: The model's leaf path for each Hugging Face name.
        layers: The input and output size of each layer that can be adapted, by path.

    Raises:
        InvalidWeights: The error names what does not fit.
    """
    if isinstance(source, str | Path):
        if config is not None:
            raise InvalidWeights(
                f"config_dict={shown(config)}: a folder has its own {CONFIG}; leave config_dict out"
            )
        folder = find(source, download_dir)
        config = _read_config(folder)
        file = TensorFile(folder / FILE)
        arrays: dict[str, Any] = {name: file.load(name) for name in file.tensors}
        what = str(folder)
    elif isinstance(source, Mapping):
        arrays = {str(name): as_array(str(name), value) for name, value in source.items()}
        what = "source"
    else:
        raise InvalidWeights(
            f"load_lora_adapter cannot read a {type(source).__name__}; it takes a PEFT folder, or "
            "a dict from PEFT's names to arrays"
        )
    if config is None:
        raise InvalidWeights(
            "load_lora_adapter: arrays alone do not say how they are scaled; give "
            'config_dict={"r": …, "lora_alpha": …}, as adapter_config.json has them'
        )
    check_config(config, what)
    # The scale of most layers. With 0, no factor would make another layer's scale of it.
    scale = _scale(config, config["r"], config["lora_alpha"]) or 1.0
    made = _fitted(_by_layer(arrays, what), config, paths, layers, max_rank, scale)
    return AdapterSource(config, scale, made)


def check_config(config: Mapping[str, Any], what: str) -> None:
    """
    Raises:
        InvalidWeights: It needs something that no engine computes.
    """
    if not isinstance(config, Mapping):
        raise InvalidWeights(
            f"{what}: config_dict={shown(config)}: expected a dict with the fields of {CONFIG} "
            "(a LoraConfig of PEFT has to_dict())"
        )
    for field, plain in _PLAIN.items():
        if (value := config.get(field)) not in plain:
            raise InvalidWeights(f"{what}: {field}={shown(value)}: engines compute plain LoRA only")
    begins = config.get("init_lora_weights")
    if isinstance(begins, str) and begins.lower().startswith(_OTHER_BASE):
        raise InvalidWeights(
            f"{what}: init_lora_weights={begins!r} changes the base's weights; convert the adapter "
            "(PEFT: save_pretrained with path_initial_model_for_weight_conversion)"
        )
    if not (_is_rank(config.get("r")) and _is_alpha(config.get("lora_alpha"))):
        raise InvalidWeights(
            f"{what}: r={shown(config.get('r'))}, lora_alpha={shown(config.get('lora_alpha'))}: "
            "expected a rank and a number"
        )
    for field, check in (("rank_pattern", _is_rank), ("alpha_pattern", _is_alpha)):
        patterns = config.get(field) or {}
        if not isinstance(patterns, Mapping) or not all(map(check, patterns.values())):
            raise InvalidWeights(
                f"{what}: {field}={shown(patterns)}: expected a number for each name"
            )


def _is_rank(value: Any) -> bool:
    return is_int(value) and 0 < value < 1 << 31


def _is_alpha(value: Any) -> bool:
    return is_number(value) and abs(value) < 1e30  # scales are float32


def _scale(config: Mapping[str, Any], rank: int, alpha: float) -> float:
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidWeights(f"{folder}: no {CONFIG} that can be read: {error}") from error
    if not isinstance(config, dict):
        raise InvalidWeights(f"{folder}: {CONFIG} is no object")
    return config


def _by_layer(arrays: Mapping[str, Array], what: str) -> dict[str, dict[str, Array]]:
    layers: dict[str, dict[str, Array]] = {}
    unknown = []
    for name, array in arrays.items():
        if (match := _NAME.match(name)) is None:
            unknown.append(name)
        elif match["side"] in (found := layers.setdefault(match["layer"], {})):
            raise InvalidWeights(f"{what}: {name}: came twice", names=[name])
        else:
            found[match["side"]] = array
    if unknown:
        raise InvalidWeights(
            f"{what}: {listed(unknown)}: only lora_A and lora_B of linear layers can be taken",
            names=unknown,
        )
    if half := [layer for layer, found in layers.items() if len(found) < 2]:
        raise InvalidWeights(
            f"{what}: {listed(half, 'layer')} without its lora_A or lora_B", names=half
        )
    if not layers:
        raise InvalidWeights(f"{what}: it is empty")
    return layers


def _fitted(
    found: Mapping[str, Mapping[str, Array]],
    config: Mapping[str, Any],
    paths: Mapping[str, str],
    layers: Mapping[str, tuple[int, int]],
    max_rank: int,
    scale: float,
) -> dict[str, tuple[Array, Array]]:
    made = {}
    for name, sides in found.items():
        path = paths.get(name + ".weight", "").removesuffix(".weight")
        if path not in layers:
            why = "is not among lora_target_modules" if path else "is no layer of this model"
            raise InvalidWeights(
                f"{name} {why}. An adapter may only have layers of the model that "
                "lora_target_modules names",
                names=[name],
            )
        a, b = sides["A"], sides["B"]
        rank, (size_in, size_out) = len(a) if a.ndim else 0, layers[path]
        if a.shape != (rank, size_in) or b.shape != (size_out, rank) or not rank:
            raise InvalidWeights(
                f"{name}: lora_A {a.shape} and lora_B {b.shape}: expected (rank, {size_in}) and "
                f"({size_out}, rank)",
                names=[name],
            )
        if rank > max_rank:
            raise InvalidWeights(
                f"{name}: rank {rank} is more than max_lora_rank={max_rank}", names=[name]
            )
        wanted = _pattern(config, "rank_pattern", name, config["r"])
        if rank != wanted:
            raise InvalidWeights(
                f"{name}: rank {rank}, but its configuration says r={wanted}", names=[name]
            )
        for side, array in sides.items():
            if not convertible(array.dtype, jax.numpy.float32):
                raise InvalidWeights(
                    f"{name}.lora_{side}: dtype {array.dtype} is no floating-point type that the "
                    "engines convert",
                    names=[name],
                )
        mine = _scale(config, rank, _pattern(config, "alpha_pattern", name, config["lora_alpha"]))
        # One scale serves the whole adapter. A layer with another one gets the ratio in its B.
        made[path] = a, b if mine == scale else _times(b, mine / scale)
    return made


def _times(array: Array, factor: float) -> Array:
    return (array.astype("float32") * factor).astype(array.dtype)


def _pattern(config: Mapping[str, Any], field: str, name: str, default: Any) -> Any:
    """PEFT's rule: a pattern is the end of a layer's name, or a regular expression of it."""
    for pattern, value in (config.get(field) or {}).items():
        try:
            found = re.match(rf"(.*\.)?({pattern})$", name)
        except re.error as error:
            raise InvalidWeights(f"{field}: {shown(pattern)}: {error}") from None
        if found:
            return value
    return default
