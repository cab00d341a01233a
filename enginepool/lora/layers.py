"""Linear layers that add the adapter's product to each row of a batch, and how a model gets them.

Reaches into upstream's model runner: `init_lora_manager` is replaced while an engine is built.

What breaks: Upstream reads adapters at the start only, and never frees their slots. Loading one
puts old base weights back. Projections that it does not know are left out silently.
Why: Its manager has a life of its own beside the model's state.
Remove when: Upstream loads and unloads adapters, as arrays, under new weights.

A and B of all slots are leaves of the model, beside the layer's weight, whose path stays as it is.
Imports sgl_jax: import it only after the patches are applied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from sgl_jax.srt.layers.linear import LinearBase
from sgl_jax.srt.lora.context_manager import LoraBatchContext

from enginepool.errors import InvalidConfig
from enginepool.lora.adapter import NO_SLOT
from enginepool.process.thread_override import ThreadOverride
from enginepool.weights.mapping import HuggingFaceMapping


class AdaptedLinear(LinearBase):
    """Upstream's linear layer, with an A and a B for each slot.

    Attributes:
        lora_A: `[slots, rank, in]`.
        lora_B: `[slots, out, rank]`.
    """

    def __init__(self, layer: LinearBase, slots: int, rank: int) -> None:
        for name, value in vars(layer).items():
            if not name.startswith("_"):  # flax's own
                setattr(self, name, value)
        weight: Any = layer.weight.get_value()
        size_in, size_out = weight.shape
        mesh, axes = weight.sharding.mesh, (*weight.sharding.spec, None, None)
        self.lora_A = _zeros(weight.dtype, mesh, (slots, rank, size_in), (None, None, axes[0]))
        self.lora_B = _zeros(weight.dtype, mesh, (slots, size_out, rank), (None, axes[1], None))

    def __call__(self, x: jax.Array, **how: Any) -> Any:  # pyright: ignore
        base: Any = super()
        output, bias = base.__call__(x, **how)
        batch: Any = LoraBatchContext.get_batch()
        slots, scales = batch.lora_token_indices, batch.lora_scalings
        # A batch without adapters does not read them.
        output = jax.lax.cond(
            (slots != NO_SLOT).any(), self._adapted, lambda output, *_: output,
            output, x, slots, scales, self.lora_A.get_value(), self.lora_B.get_value(),
        )  # fmt: skip
        return output, bias

    @staticmethod
    def _adapted(
        output: jax.Array,
        x: jax.Array,
        slots: jax.Array,
        scales: jax.Array,
        lora_a: jax.Array,
        lora_b: jax.Array,
    ) -> jax.Array:
        of = jax.typeof(output).sharding
        rows = of.spec[0]
        low = jnp.einsum(
            "td,xrd->txr",
            x,
            lora_a,
            preferred_element_type=jnp.float32,
            out_sharding=NamedSharding(of.mesh, PartitionSpec(rows, None, None)),
        )
        mine = slots[:, None] == jnp.arange(len(lora_a))
        # Not a product: another adapter may overflow, and infinity times zero is NaN.
        low = jnp.where(mine[:, :, None], low * scales[:, None, None], 0).astype(lora_b.dtype)
        added = jnp.einsum(
            "txr,xor->to", low, lora_b, preferred_element_type=jnp.float32, out_sharding=of
        )
        return (output + added).astype(output.dtype)


def _zeros(dtype: Any, mesh: Any, shape: tuple[int, ...], axes: tuple[Any, ...]) -> nnx.Param:
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return nnx.Param(jax.device_put(jnp.zeros(shape, dtype), sharding))


def on_batch(forward_batch: Any) -> AbstractContextManager[None]:
    """Inside the block, the model's layers use this batch's slots."""
    return LoraBatchContext.set_batch(forward_batch)


def adapting() -> AbstractContextManager[None]:
    """Inside the block, engines that this thread builds with `enable_lora` get adapted layers."""
    return _override.on_this_thread()


def _install() -> Callable[[], None]:
    from sgl_jax.srt.model_executor.model_runner import ModelRunner

    kind: Any = ModelRunner
    upstreams = kind.init_lora_manager

    def init_lora_manager(runner: Any) -> None:
        if _override.active:
            args = runner.server_args
            _adapt(runner, args.max_loras_per_batch, args.max_lora_rank, args.lora_target_modules)
        else:
            upstreams(runner)

    kind.init_lora_manager = init_lora_manager

    def restore() -> None:
        kind.init_lora_manager = upstreams

    return restore


_override = ThreadOverride(_install)


def _adapt(runner: Any, slots: int, rank: int, targets: Any) -> None:
    """Replace the target layers of a model that has its weights.

    Raises:
        InvalidConfig: A target cannot be adapted.
    """
    model, targets = runner.model, sorted(targets)
    flat = nnx.to_flat_state(nnx.state(model))
    specs: dict[str, Any] = {".".join(map(str, path)): leaf.get_value() for path, leaf in flat}
    mapping = HuggingFaceMapping(model, runner.model_config, specs)
    found = dict.fromkeys(targets, 0)
    for name, path in mapping.paths.items():
        *_, module, kind = name.split(".")
        if module not in found or kind != "weight":
            continue
        found[module] += 1
        *parents, attribute = path.removesuffix(".weight").split(".")
        parent = _module(model, parents)
        layer = getattr(parent, attribute, None)
        if type(layer) is not LinearBase:
            raise InvalidConfig(
                f"lora_target_modules: {name} is no plain linear layer in this engine "
                f"({_named(mapping, path, layer)}), and cannot be adapted; leave {module} out"
            )
        setattr(parent, attribute, AdaptedLinear(layer, slots, rank))
    if absent := [module for module, count in found.items() if not count]:
        raise InvalidConfig(
            f"lora_target_modules: this model has no {', '.join(absent)}; leave it out"
        )


def _named(mapping: HuggingFaceMapping, path: str, layer: Any) -> str:
    if len(mapping.names[path]) > 1:
        return "experts are stacked"
    return type(layer).__name__


def _module(model: Any, parts: list[str]) -> Any:
    for part in parts:
        model = model[int(part)] if part.isdigit() else getattr(model, part)
    return model


def adapted_layers(model: Any) -> Mapping[str, AdaptedLinear]:
    """The adapted layers of a model by path."""
    return {
        ".".join(map(str, path)): node
        for path, node in nnx.iter_graph(model)
        if isinstance(node, AdaptedLinear)
    }
