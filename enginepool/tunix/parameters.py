"""From the parameters of a Tunix model to a source of `update_weights`, on the devices."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.generate.mappings import MappingConfig  # pyright: ignore[reportMissingImports]

from enginepool import InvalidConfig, InvalidWeights

_LORA_A, _LORA_B = "_lora_a", "_lora_b"  # qwix's names, behind the parameter's own


def flat_params(state: Any) -> dict[str, jax.Array]:
    """The parameters of an nnx state by dotted path."""
    return {
        ".".join(map(str, path)): leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        for path, leaf in nnx.to_flat_state(state)
    }


def _state(params: Mapping[str, jax.Array]) -> Any:
    """The inverse of `flat_params`."""
    paths: Any = [
        (tuple(int(key) if key.isdigit() else key for key in name.split(".")), nnx.Param(value))
        for name, value in params.items()
    ]
    return nnx.State.from_flat_path(paths)


def mapping_config(model: Any, mapping: Any | None) -> MappingConfig:
    """How Tunix itself would rename and reshape a model's parameters.

    Args:
        model: Tunix's, which brings a mapping for sglang-jax along if it is a Qwen2, Qwen3 or
            Llama3.
        mapping: Instead, what `RolloutConfig.rollout_mapping_config` may be. Its `to_hf_mappings`
            lead to an engine's own paths or to Hugging Face names.

    Raises:
        InvalidConfig: There is neither.
    """
    try:
        config = MappingConfig.build(mapping, model, backend="sglang_jax")
    except RuntimeError:  # the class has mappings, and none for sglang-jax
        config = None
    if config is None or not config.to_hf_mappings:
        raise InvalidConfig(
            f"Tunix has no mapping from {type(model).__name__} to sglang-jax: give one as "
            "RolloutConfig.rollout_mapping_config, whose `to_hf_mappings` may lead to Hugging Face "
            "names"
        )
    return config


class ParameterMapping:
    """Names a model's parameters as an engine does, or as Hugging Face does, and shapes them so.

    Args:
        config: From `mapping_config`.
        shapes: Of an engine's parameters, by path.
    """

    def __init__(self, config: MappingConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._preprocess = config.preprocess_src_state
        self._transposes: Mapping[str, Any] = config.to_hf_transpose_keys or {}
        self._hooks: Mapping[str, Any] = config.to_hf_hook_fns or {}
        self._targets = [
            (re.compile(re.escape(name).replace(r"\*", r"(\d+)")), name, target)
            for name, (target, *_) in (config.to_hf_mappings or {}).items()
        ]
        # Hugging Face calls every parameter a weight or a bias.
        targets = [target for *_, target in self._targets]
        self._by_path = not all(target.endswith((".weight", ".bias")) for target in targets)

    def source(self, params: Mapping[str, jax.Array]) -> dict[Any, jax.Array]:
        """What `update_weights` takes.

        Raises:
            InvalidWeights: Parameters of which the mapping says nothing.
        """
        if self._preprocess is not None:
            params = flat_params(self._preprocess(_state(params)))
        source: dict[Any, jax.Array] = {}
        unknown = []
        for name, value in params.items():
            found = self._find(name)
            if found is None:
                unknown.append(name)
                continue
            pattern, target = found
            value = self._shaped(name, pattern, target, value)
            # A tuple says that this is a path: some names are also Hugging Face's.
            source[tuple(target.split(".")) if self._by_path else target] = value
        if unknown:
            raise InvalidWeights(
                f"the mapping of this model leaves out {len(unknown)} of {len(params)} parameters, "
                f"{', '.join(unknown[:4])} among them; add them to `to_hf_mappings` of "
                "RolloutConfig.rollout_mapping_config",
                names=unknown,
            )
        return source

    def _find(self, name: str) -> tuple[str, str] | None:
        for expression, pattern, target in self._targets:
            if match := expression.fullmatch(name):
                for number in match.groups():
                    target = target.replace("*", number, 1)
                return pattern, target
        return None

    def _shaped(self, name: str, pattern: str, target: str, value: jax.Array) -> jax.Array:
        keys = (name, pattern, name.rpartition(".")[2])
        if axes := next((self._transposes[key] for key in keys if key in self._transposes), None):
            value = jnp.transpose(value, axes)
        if hook := next((self._hooks[key] for key in keys if key in self._hooks), None):
            value = hook(value)
        # Tunix keeps heads apart, an engine does not. What does not fit, the update will say.
        shape = self._shapes.get(target) if self._by_path else None
        return value if shape is None or value.size != math.prod(shape) else value.reshape(shape)


def merge_lora(params: Mapping[str, jax.Array], scaling: float | None) -> dict[str, jax.Array]:
    """The parameters without adapters: those that have one are replaced by the sum.

    Args:
        scaling: alpha / rank, which the model's parameters do not tell.
    """
    merged = {name: v for name, v in params.items() if not name.endswith((_LORA_A, _LORA_B))}
    for name in params:
        if not name.endswith(_LORA_A):
            continue
        if scaling is None:
            raise InvalidConfig(
                "the actor has LoRA parameters, which do not tell their scale: give alpha / rank "
                "as RolloutConfig.rollout_sglang_jax_lora_scaling"
            )
        base = name.removesuffix(_LORA_A)
        if base not in merged:
            raise InvalidWeights(
                f"{base} has an adapter and is no plain parameter: adapters cannot be merged into "
                "a quantised base; train them on one that is not quantised",
                names=[base],
            )
        a, b, weight = params[name], params[base + _LORA_B], merged[base]
        if a.shape[:-1] + b.shape[1:] != weight.shape:
            raise InvalidWeights(
                f"{base} has shape {weight.shape} and its adapter {a.shape} by {b.shape}: only "
                "adapters of input by rank and rank by output can be merged",
                names=[base],
            )
        merged[base] = _sum(weight, a, b, scaling)
    return merged


@partial(jax.jit, static_argnames="scaling")
def _sum(weight: jax.Array, a: jax.Array, b: jax.Array, scaling: float) -> jax.Array:
    product = jnp.tensordot(
        a.astype(jnp.float32), b.astype(jnp.float32), 1, precision=jax.lax.Precision.HIGHEST
    )
    return (weight.astype(jnp.float32) + scaling * product).astype(weight.dtype)
