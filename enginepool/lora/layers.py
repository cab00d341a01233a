"""Linear layers that add the adapter's product to each row of a batch, and how a model gets them.

Reaches into upstream's model runner: `init_lora_manager` is replaced while an engine is built.

What breaks: Upstream reads adapters at the start only, and never frees their slots. Loading one
puts old base weights back. Projections that it does not know are left out silently.
Why: Upstream keeps adapters in a manager, apart from the model's state.
Remove when: Upstream loads and unloads adapters, as arrays, under new weights.

One leaf of the model has A of all slots and of all layers of a kind, and another leaf has B. So a
launch has few additional arguments. XLA leaves such large arrays where they are. It copies smaller
ones into a TPU's fast memory before it knows whether they are needed.
Imports sgl_jax: import it only after the patches are applied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sgl_jax.srt.layers.linear import LinearBase
from sgl_jax.srt.lora.context_manager import LoraBatchContext
from sgl_jax.srt.model_executor.forward_batch_info import ForwardBatch
from sgl_jax.srt.model_executor.model_runner import ModelRunner

from enginepool.errors import InvalidConfig
from enginepool.lora.adapter import NO_SLOT
from enginepool.process.thread_override import ThreadOverride
from enginepool.weights.mapping import HuggingFaceMapping


class AdaptedLinear(LinearBase):
    """Upstream's linear layer, with an A and a B for each slot.

    Attributes:
        lora_A: `[layers, slots, rank, in]`, of all layers of its kind.
        lora_B: `[layers, slots, out, rank]`, likewise.
        lora_index: Which of these layers it is.
    """

    def __init__(self, layer: LinearBase, index: int, lora_a: nnx.Param, lora_b: nnx.Param) -> None:
        for name, value in vars(layer).items():
            if not name.startswith("_"):  # flax's own
                setattr(self, name, value)
        self.lora_A, self.lora_B, self.lora_index = lora_a, lora_b, index

    def __call__(self, x: jax.Array, **how: Any) -> Any:  # pyright: ignore
        base: Any = super()
        output, bias = base.__call__(x, **how)
        batch: Any = LoraBatchContext.get_batch()
        slots, scales = batch.lora_token_indices, batch.lora_scalings
        # A batch without adapters does not read them.
        output = jax.lax.cond(
            (slots != NO_SLOT).any(), self._add_product, lambda output, *_: output,
            output, x, slots, scales, self.lora_A.get_value(), self.lora_B.get_value(),
        )  # fmt: skip
        return output, bias

    def _add_product(
        self,
        output: jax.Array,
        x: jax.Array,
        slots: jax.Array,
        scales: jax.Array,
        all_a: jax.Array,
        all_b: jax.Array,
    ) -> jax.Array:
        lora_a, lora_b = (
            jax.lax.index_in_dim(each, self.lora_index, keepdims=False) for each in (all_a, all_b)
        )
        sharding = jax.typeof(output).sharding
        rows = sharding.spec[0]
        low = jnp.einsum(
            "td,xrd->txr",
            x,
            lora_a,
            preferred_element_type=jnp.float32,
            out_sharding=NamedSharding(sharding.mesh, PartitionSpec(rows, None, None)),
        )
        mine = slots[:, None] == jnp.arange(len(lora_a))
        # `where`, not a product with 0 or 1: in another adapter's slot `low` may be infinite, and
        # infinity times zero is NaN.
        low = jnp.where(mine[:, :, None], low * scales[:, None, None], 0).astype(lora_b.dtype)
        added = jnp.einsum(
            "txr,xor->to", low, lora_b, preferred_element_type=jnp.float32, out_sharding=sharding
        )
        return (output + added).astype(output.dtype)


def with_slots(layers: Sequence[LinearBase], slots: int, rank: int) -> list[AdaptedLinear]:
    """Layers of one kind, with empty slots."""
    weight: Any = layers[0].weight.get_value()
    size_in, size_out = weight.shape
    mesh, axes, count = weight.sharding.mesh, (*weight.sharding.spec, None, None), len(layers)
    shape_a, shape_b = (count, slots, rank, size_in), (count, slots, size_out, rank)
    lora_a = _zeros(weight.dtype, mesh, shape_a, (None, None, None, axes[0]))
    lora_b = _zeros(weight.dtype, mesh, shape_b, (None, None, axes[1], None))
    return [AdaptedLinear(layer, index, lora_a, lora_b) for index, layer in enumerate(layers)]


def _zeros(dtype: Any, mesh: Mesh, shape: tuple[int, ...], axes: tuple[Any, ...]) -> nnx.Param:
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return nnx.Param(jax.device_put(jnp.zeros(shape, dtype), sharding))


def on_batch(forward_batch: ForwardBatch) -> AbstractContextManager[None]:
    """Inside the block, the model's layers use this batch's slots."""
    return LoraBatchContext.set_batch(forward_batch)


def adapting() -> AbstractContextManager[None]:
    """Inside the block, engines that this thread builds with `enable_lora` get adapted layers."""
    return _override.on_this_thread()


def _install() -> Callable[[], None]:
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


def _adapt(runner: ModelRunner, slots: int, rank: int, targets: Any) -> None:
    """Replace the target layers of a model that has its weights.

    Raises:
        InvalidConfig: A target cannot be adapted.
    """
    model, targets = runner.model, sorted(targets)
    flat = nnx.to_flat_state(nnx.state(model))
    specs: dict[str, Any] = {".".join(map(str, path)): leaf.get_value() for path, leaf in flat}
    mapping = HuggingFaceMapping(model, runner.model_config, specs)
    found = dict.fromkeys(targets, 0)
    kinds: dict[Any, list[tuple[Any, str, LinearBase]]] = {}
    for name, path in mapping.paths.items():
        *_, module, last = name.split(".")
        if module not in found or last != "weight":
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
        weight: Any = layer.weight.get_value()
        kind = module, weight.shape, weight.dtype, weight.sharding
        kinds.setdefault(kind, []).append((parent, attribute, layer))
    if absent := [module for module, count in found.items() if not count]:
        raise InvalidConfig(
            f"lora_target_modules: this model has no {', '.join(absent)}; leave it out"
        )
    for same in kinds.values():
        adapted = with_slots([layer for *_, layer in same], slots, rank)
        for (parent, attribute, _), layer in zip(same, adapted, strict=True):
            setattr(parent, attribute, layer)


def _named(mapping: HuggingFaceMapping, path: str, layer: Any) -> str:
    if len(mapping.names[path]) > 1:
        return "experts are stacked"
    return type(layer).__name__


def _module(model: Any, parts: list[str]) -> Any:
    for part in parts:
        model = model[int(part)] if part.isdigit() else getattr(model, part)
    return model


def layers_by_kind(model: nnx.Module) -> list[dict[str, AdaptedLinear]]:
    """The adapted layers of a model, by kind. Layers of a kind share leaves. Each dict has them by
    path, in the order of `lora_index`."""
    found: dict[int, dict[str, AdaptedLinear]] = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, AdaptedLinear):
            found.setdefault(id(node.lora_A), {})[".".join(map(str, path))] = node
    return [
        dict(sorted(same.items(), key=lambda one: one[1].lora_index)) for same in found.values()
    ]
