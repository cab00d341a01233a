"""Turns the parameters of a Tunix model into a source of `update_weights`, on the devices."""

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

_LORA_A, _LORA_B = "_lora_a", "_lora_b"  # qwix appends these to the parameter's name


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
    """How Tunix renames and reshapes a model's parameters.

    Args:
        model: Tunix's model. Qwen2, Qwen3 and Llama3 have a mapping for sglang-jax of their own.
        mapping: A value of `RolloutConfig.rollout_mapping_config`, which replaces the model's
            mapping. Its `to_hf_mappings` lead to an engine's own paths or to Hugging Face names.

    Raises:
        InvalidConfig: There is no mapping.
    """
    try:
        config = MappingConfig.build(mapping, model, backend="sglang_jax")
    except RuntimeError:  # the class has mappings, but none for sglang-jax
        config = None
    if config is None or not config.to_hf_mappings:
        raise InvalidConfig(
            f"Tunix has no mapping from {type(model).__name__} to sglang-jax: give one as "
            "RolloutConfig.rollout_mapping_config, whose `to_hf_mappings` may lead to Hugging Face "
            "names"
        )
    return config


class ParameterMapping:
    """Gives a model's parameters the names and shapes of an engine, or of Hugging Face.

    Args:
        config: The result of `mapping_config`.
        shapes: The shapes of an engine's parameters, by path.
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
        """The parameters as `update_weights` takes them.

        Raises:
            InvalidWeights: The mapping leaves out parameters.
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
            # A tuple marks a path, because some paths are also Hugging Face names.
            source[tuple(target.split(".")) if self._by_path else target] = value
        if unknown:
            raise InvalidWeights(
                f"the mapping of this model leaves out {len(unknown)} of {len(params)} parameters, "
                f"{', '.join(unknown[:4])} among them; add them to `to_hf_mappings` of "
                "RolloutConfig.rollout_mapping_config",
                names=unknown,
            )
        return source

    def adapter(self, adapters: Mapping[str, tuple[jax.Array, jax.Array]]) -> dict[str, jax.Array]:
        """Adapters as `load_lora_adapter` takes them: arrays by PEFT's names.

        Args:
            adapters: A and B, by the name of the parameter that they adapt.

        Raises:
            InvalidWeights: The mapping may change the order of inputs or outputs.
        """
        arrays: dict[str, jax.Array] = {}
        for name, (a, b) in adapters.items():
            found = None if self._preprocess else self._find(name)
            if found is None or not self._keeps_order(name, found[0], a.ndim - 1):
                raise InvalidWeights(
                    f"{name}: its mapping does not say where inputs and outputs of an adapter are; "
                    "leave lora_name out, and adapters are merged",
                    names=[name],
                )
            layer = found[1].removesuffix(".weight")
            arrays[f"{layer}.lora_A.weight"] = a.reshape(-1, a.shape[-1]).T
            arrays[f"{layer}.lora_B.weight"] = b.reshape(len(b), -1).T
        return arrays

    def _keeps_order(self, name: str, pattern: str, inputs: int) -> bool:
        """Whether a mapping keeps the order of a parameter's inputs and of its outputs."""
        keys = _keys(name, pattern)
        if any(key in self._hooks for key in keys):
            return False
        axes = next((self._transposes[key] for key in keys if key in self._transposes), ())
        ins, outs = ([axis for axis in axes if (axis < inputs) == side] for side in (True, False))
        return ins == sorted(ins) and outs == sorted(outs)

    def _find(self, name: str) -> tuple[str, str] | None:
        for expression, pattern, target in self._targets:
            if match := expression.fullmatch(name):
                for number in match.groups():
                    target = target.replace("*", number, 1)
                return pattern, target
        return None

    def _shaped(self, name: str, pattern: str, target: str, value: jax.Array) -> jax.Array:
        keys = _keys(name, pattern)
        if axes := next((self._transposes[key] for key in keys if key in self._transposes), None):
            value = jnp.transpose(value, axes)
        if hook := next((self._hooks[key] for key in keys if key in self._hooks), None):
            value = hook(value)
        # Tunix has an axis for heads, an engine has not. The update reports what does not fit.
        shape = self._shapes.get(target) if self._by_path else None
        return value if shape is None or value.size != math.prod(shape) else value.reshape(shape)


def _keys(name: str, pattern: str) -> tuple[str, ...]:
    """How a mapping may name a parameter's transposition or hook."""
    return name, pattern, name.rpartition(".")[2]


def split_lora(
    params: Mapping[str, jax.Array], scaling: float | None
) -> tuple[dict[str, jax.Array], dict[str, tuple[jax.Array, jax.Array]]]:
    """The parameters without adapters, and the adapters by the parameter that they adapt.

    Args:
        scaling: alpha / rank. The model's parameters do not contain it.
    """
    base = {name: v for name, v in params.items() if not name.endswith((_LORA_A, _LORA_B))}
    names = [name.removesuffix(_LORA_A) for name in params if name.endswith(_LORA_A)]
    adapters = {name: (params[name + _LORA_A], params[name + _LORA_B]) for name in names}
    for name, (a, b) in adapters.items():
        if scaling is None:
            raise InvalidConfig(
                "the actor has LoRA parameters, whose scale is not known: give alpha / rank as "
                "RolloutConfig.rollout_sglang_jax_lora_scaling"
            )
        if name not in base:
            raise InvalidWeights(
                f"{name} has an adapter and is quantised: engines cannot take a quantised base; "
                "train adapters on one that is not quantised",
                names=[name],
            )
        if a.shape[:-1] + b.shape[1:] != base[name].shape:
            raise InvalidWeights(
                f"{name} has shape {base[name].shape} and its adapter {a.shape} by {b.shape}: only "
                "adapters of input by rank and rank by output can be synced",
                names=[name],
            )
    return base, adapters


def merge_lora(params: Mapping[str, jax.Array], scaling: float | None) -> dict[str, jax.Array]:
    """Merge each adapter into its parameter. The result has no adapters."""
    merged, adapters = split_lora(params, scaling)
    for name, (a, b) in adapters.items():
        assert scaling is not None
        merged[name] = _sum(merged[name], a, b, scaling)
    return merged


@partial(jax.jit, static_argnames="scaling")
def _sum(weight: jax.Array, a: jax.Array, b: jax.Array, scaling: float) -> jax.Array:
    product = jnp.tensordot(
        a.astype(jnp.float32), b.astype(jnp.float32), 1, precision=jax.lax.Precision.HIGHEST
    )
    return (weight.astype(jnp.float32) + scaling * product).astype(weight.dtype)
