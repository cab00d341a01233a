"""The model's forward, as a part of the step program.

Reaches into upstream's models and attention backends.

What breaks: Every forward needs arguments from the host, so every step waits for the host.
Why: Upstream computes positions, slots and pages from requests, on the host.
Remove when: With `program.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from sgl_jax.srt.layers.logits_processor import LogitsMetadata
from sgl_jax.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sgl_jax.srt.speculative.spec_info import SpeculativeAlgorithm

from enginepool.dispatch.routed_experts import Routing
from enginepool.engine.common_programs import CommonPrograms, structure_without_devices
from enginepool.engine.routed_experts import stacked
from enginepool.lora.adapter import NO_SLOT
from enginepool.lora.layers import on_batch

if TYPE_CHECKING:
    from sgl_jax.srt.layers.logits_processor import LogitsProcessorOutput
    from sgl_jax.srt.model_executor.model_runner import ModelRunner


def put(mesh: AbstractMesh, array: jax.Array, *spec: Any) -> jax.Array:
    """Inside a program: give an array this sharding."""
    return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec(*spec)))


class Model:
    """Runs upstream's model inside a program.

    The program outlives a closed engine and serves all engines of its kind. So this holds no model
    runner, no array and no device.
    """

    def __init__(
        self, runner: ModelRunner, programs: CommonPrograms, routing: Routing | None
    ) -> None:
        """
        Args:
            routing: How the model routes, if its experts are wanted.
        """
        self._routing = routing
        self.mesh, self.page_size = runner.mesh.abstract_mesh, runner.page_size
        self._definition, state = programs.split(runner.model)
        self._tree = jax.tree.structure(state)
        self._pools = structure_without_devices(jax.tree.structure(runner.memory_pools))
        self._backend = structure_without_devices(jax.tree.structure(runner.attn_backend))
        self.kernel = type(runner.attn_backend).__name__ == "FlashAttention"

    def backend(self, **metadata: jax.Array) -> Any:
        """A backend for this trace. Upstream's own would keep traced arrays.

        Args:
            metadata: The metadata of upstream's attention kernel, if that is used.
        """
        backend: Any = jax.tree.unflatten(self._backend, [None] * self._backend.num_leaves)
        if self.kernel:
            from sgl_jax.srt.layers.attention.flashattention_backend import FlashAttentionMetadata

            laid_out = {name: put(self.mesh, array, "data") for name, array in metadata.items()}
            object.__setattr__(backend, "forward_metadata", FlashAttentionMetadata(**laid_out))
        return backend

    def adapt(self, batch: ForwardBatch, slots: jax.Array, scales: jax.Array) -> None:
        """Give each id of a batch its adapter's slot, and the scale. Only layers with adapters read
        them."""
        batch.lora_token_indices = put(self.mesh, slots, "data")
        batch.lora_scalings = put(self.mesh, scales, "data")

    def __call__(
        self,
        leaves: list[jax.Array],
        kv: list[jax.Array],
        batch: ForwardBatch,
        wanted: LogitsMetadata,
        head: Callable[[Any], Any] | None = None,
    ) -> tuple[Any, list[jax.Array], jax.Array | None]:
        """
        Args:
            leaves: The model's arrays.
            kv: The KV buffers.
            head: Wraps the model's logits processor.

        Returns:
            The result of the model or its `head`, the KV buffers, and the experts of each id if
            they are wanted.
        """
        pools = jax.tree.unflatten(self._pools, kv)
        model = nnx.merge(self._definition, jax.tree.unflatten(self._tree, leaves))
        if head is not None:
            # Set through `vars`: nnx would count the head's arrays as the model's.
            vars(model)["logits_processor"] = head(model.logits_processor)
        with jax.sharding.use_abstract_mesh(self.mesh), on_batch(batch):
            output, updates, *_, layers = model(batch, pools, wanted)
            experts = None if self._routing is None else stacked(layers, self._routing.dtype)
        pools.replace_all(updates)
        # With another layout the next step would be another program.
        kept = [
            jax.sharding.reshard(new, jax.typeof(old).sharding)
            for new, old in zip(jax.tree.leaves(pools), kv, strict=True)
        ]
        return output, kept, experts


def round_logits(output: LogitsProcessorOutput) -> None:
    """Inside a program: round the logits to bfloat16, if that is their dtype. In upstream's steps
    they are rounded when they leave the program. Inside a program XLA may keep more precision."""
    if output.next_token_logits.dtype == jnp.bfloat16:
        output.next_token_logits = jax.lax.reduce_precision(output.next_token_logits, 8, 7)


class Forward:
    """A decode step of upstream's model, on a batch that is on the device."""

    def __init__(
        self,
        runner: ModelRunner,
        programs: CommonPrograms,
        kv_slots: dict[int, int],
        routing: Routing | None,
    ) -> None:
        """
        Args:
            kv_slots: By number of rows: how many KV slots a batch of that size can have.
            routing: How the model routes, if its experts are wanted.
        """
        self._model, self._kv_slots = Model(runner, programs, routing), kv_slots

    def __call__(
        self,
        leaves: list[jax.Array],
        kv: list[jax.Array],
        ids: jax.Array,
        lengths: jax.Array,
        block_table: jax.Array,
        adapters: tuple[jax.Array, jax.Array],
    ) -> tuple[LogitsProcessorOutput, list[jax.Array], jax.Array, jax.Array | None]:
        """
        Args:
            leaves: The model's arrays.
            kv: The KV buffers.
            ids: By row: its last id.
            lengths: By row: how many tokens it has, with the last one. 0 if it has ended.
            block_table: By row: its KV pages.
            adapters: By row: the slot of its adapter, and the scale.

        Returns:
            The model's output, the KV buffers, the positions of the last ids, and the experts of
            these ids, if they are wanted.
        """
        positions = jnp.where(lengths > 0, lengths - 1, 0)
        batch = self._batch(ids, lengths, positions, block_table)
        slots, scales = adapters
        self._model.adapt(batch, jnp.where(lengths > 0, slots, NO_SLOT), scales)
        wanted = LogitsMetadata(
            forward_mode=ForwardMode.DECODE, capture_hidden_mode=CaptureHiddenMode.NULL
        )
        output, kv, experts = self._model(leaves, kv, batch, wanted)
        round_logits(output)
        return output, kv, positions, experts

    def _batch(
        self, ids: jax.Array, lengths: jax.Array, positions: jax.Array, block_table: jax.Array
    ) -> ForwardBatch:
        """The batch that upstream would make on the host for a decode step."""
        mesh, size, rows = self._model.mesh, self._model.page_size, len(ids)
        kv_slots = self._kv_slots[rows]
        page = jnp.take_along_axis(block_table, (positions // size)[:, None], axis=1)[:, 0]
        slots = jnp.where(lengths > 0, page * size + positions % size, -1)
        metadata = _kernel_metadata(lengths, block_table, size, kv_slots)
        return ForwardBatch(
            bid=0,
            forward_mode=ForwardMode.DECODE,
            batch_size=rows,
            input_ids=put(mesh, ids, "data"),
            req_pool_indices=put(mesh, jnp.arange(rows, dtype=jnp.int32), "data"),
            seq_lens=put(mesh, lengths, "data"),
            out_cache_loc=put(mesh, slots, "data"),
            positions=put(mesh, positions, "data"),
            attn_backend=self._model.backend(**metadata),
            cache_loc=put(mesh, slots_of(lengths, block_table, size, kv_slots), "data"),
            spec_algorithm=SpeculativeAlgorithm.NONE,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )


def _pages_of(
    lengths: jax.Array, block_table: jax.Array, page_size: int, kv_slots: int
) -> jax.Array:
    """The KV pages of all rows, one row after the other, padded with zeros."""
    pages = (lengths + page_size - 1) // page_size
    ends = jnp.cumsum(pages)
    place = jnp.arange(kv_slots // page_size)
    row = jnp.clip(
        jnp.searchsorted(ends, place, side="right", method="compare_all"), 0, len(lengths) - 1
    )
    within = jnp.clip(place - (ends - pages)[row], 0, block_table.shape[1] - 1)
    return jnp.where(place < ends[-1], block_table[row, within], 0).astype(jnp.int32)


def slots_of(
    lengths: jax.Array, block_table: jax.Array, page_size: int, kv_slots: int
) -> jax.Array:
    """The KV slots of all rows. Each row begins with a new page."""
    pages = _pages_of(lengths, block_table, page_size, kv_slots)
    slots = pages[:, None] * page_size + jnp.arange(page_size, dtype=jnp.int32)
    return slots.reshape(-1)


def _kernel_metadata(
    lengths: jax.Array, block_table: jax.Array, page_size: int, kv_slots: int
) -> dict[str, jax.Array]:
    """The metadata of upstream's attention kernel for a decode step.

    The kernel expects all active rows before the others. Here ended rows lie between them. So an
    ended row gets the length 1, and page 0, which no request ever has.
    """
    rows = len(lengths)
    block_table = jnp.where(lengths[:, None] > 0, block_table, 0)
    lengths = jnp.maximum(lengths, 1)
    aligned = (lengths + page_size - 1) // page_size * page_size
    return {
        "cu_q_lens": jnp.arange(rows + 1, dtype=jnp.int32),
        "cu_kv_lens": jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(aligned)]),
        "page_indices": _pages_of(lengths, block_table, page_size, kv_slots),
        "seq_lens": lengths,
        "distribution": jnp.full(3, rows, jnp.int32),
    }
