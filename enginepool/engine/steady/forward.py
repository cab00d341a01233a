"""A model's forward of a decode step, in a program, from what a batch has on its device.

Reaches into upstream's models and attention backends.

What breaks: A forward is given what its step needs by the host, which then is where every step
begins.
Why: Positions, slots and pages are computed there, from requests.
Remove when: With `program.py`, of which this is a part.
"""

from __future__ import annotations

from typing import Any

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

from enginepool.engine.common_programs import CommonPrograms, structure_without_devices


def put(mesh: AbstractMesh, array: jax.Array, *spec: Any) -> jax.Array:
    """Lay an array out like this, in a program."""
    return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec(*spec)))


class Forward:
    """It holds neither the model runner nor an array: the program that is made with it would
    outlive a closed engine. Nor a device: it is for all engines that are alike.
    """

    def __init__(self, runner: Any, programs: CommonPrograms, places: dict[int, int]) -> None:
        """
        Args:
            places: By rows of a batch: the KV slots that they all can have.
        """
        self._mesh, self._page_size = runner.mesh.abstract_mesh, runner.page_size
        self._places = places
        self._definition, state = programs.split(runner.model)
        self._tree = jax.tree.structure(state)
        self._pools = structure_without_devices(jax.tree.structure(runner.memory_pools))
        self._backend = structure_without_devices(jax.tree.structure(runner.attn_backend))
        self._kernel = type(runner.attn_backend).__name__ == "FlashAttention"

    def __call__(
        self, leaves: Any, kv: Any, ids: jax.Array, lengths: jax.Array, table: jax.Array
    ) -> tuple[Any, list[jax.Array], jax.Array]:
        """
        Args:
            leaves: The model's.
            kv: The KV buffers.
            ids: By row: its last id.
            lengths: By row: its tokens, with the last one; 0 for a row that is no more.
            table: By row: its KV pages.

        Returns:
            What the model gives, the KV buffers, and the positions of the last ids.
        """
        positions = jnp.where(lengths > 0, lengths - 1, 0)
        batch = self._batch(ids, lengths, positions, table)
        wanted = LogitsMetadata(
            forward_mode=ForwardMode.DECODE, capture_hidden_mode=CaptureHiddenMode.NULL
        )
        pools = jax.tree.unflatten(self._pools, kv)
        model = nnx.merge(self._definition, jax.tree.unflatten(self._tree, leaves))
        with jax.sharding.use_abstract_mesh(self._mesh):
            output, updates, *_ = model(batch, pools, wanted)
        pools.replace_all(updates)
        if output.next_token_logits.dtype == jnp.bfloat16:
            # Within one program XLA may go on with what was not rounded yet.
            output.next_token_logits = jax.lax.reduce_precision(output.next_token_logits, 8, 7)
        # As they came in, or the next step is another program.
        kept = [
            jax.sharding.reshard(new, jax.typeof(old).sharding)
            for new, old in zip(jax.tree.leaves(pools), kv, strict=True)
        ]
        return output, kept, positions

    def _batch(
        self, ids: jax.Array, lengths: jax.Array, positions: jax.Array, table: jax.Array
    ) -> ForwardBatch:
        """What upstream makes of a batch on the host, for a decode step."""
        mesh, size, rows = self._mesh, self._page_size, len(ids)
        places = self._places[rows]
        page = jnp.take_along_axis(table, (positions // size)[:, None], axis=1)[:, 0]
        slots = jnp.where(lengths > 0, page * size + positions % size, -1)
        # A backend of the trace's own: upstream's would keep what is traced.
        backend: Any = jax.tree.unflatten(self._backend, [None] * self._backend.num_leaves)
        if self._kernel:
            metadata = _kernel_metadata(lengths, table, size, places)
            metadata = jax.tree.map(lambda array: put(mesh, array, "data"), metadata)
            object.__setattr__(backend, "forward_metadata", metadata)
        return ForwardBatch(
            bid=0,
            forward_mode=ForwardMode.DECODE,
            batch_size=rows,
            input_ids=put(mesh, ids, "data"),
            req_pool_indices=put(mesh, jnp.arange(rows, dtype=jnp.int32), "data"),
            seq_lens=put(mesh, lengths, "data"),
            out_cache_loc=put(mesh, slots, "data"),
            positions=put(mesh, positions, "data"),
            attn_backend=backend,
            cache_loc=put(mesh, slots_of(lengths, table, size, places), "data"),
            spec_algorithm=SpeculativeAlgorithm.NONE,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )


def _pages_of(lengths: jax.Array, table: jax.Array, page_size: int, places: int) -> jax.Array:
    """The KV pages of all rows, row after row; then zeros."""
    pages = (lengths + page_size - 1) // page_size
    ends = jnp.cumsum(pages)
    place = jnp.arange(places // page_size)
    row = jnp.clip(jnp.searchsorted(ends, place, side="right"), 0, len(lengths) - 1)
    within = jnp.clip(place - (ends - pages)[row], 0, table.shape[1] - 1)
    return jnp.where(place < ends[-1], table[row, within], 0).astype(jnp.int32)


def slots_of(lengths: jax.Array, table: jax.Array, page_size: int, places: int) -> jax.Array:
    """Their slots, each row's from the beginning of a page."""
    pages = _pages_of(lengths, table, page_size, places)
    slots = pages[:, None] * page_size + jnp.arange(page_size, dtype=jnp.int32)
    return slots.reshape(-1)


def _kernel_metadata(lengths: jax.Array, table: jax.Array, page_size: int, places: int) -> Any:
    """What upstream's attention kernel is told of a decode step.

    It takes the rows that there are to be the first ones. Here they lie between others that have
    ended: such a row is one token long, on the page that nobody is given.
    """
    from sgl_jax.srt.layers.attention.flashattention_backend import FlashAttentionMetadata

    rows = len(lengths)
    table = jnp.where(lengths[:, None] > 0, table, 0)
    lengths = jnp.maximum(lengths, 1)
    aligned = (lengths + page_size - 1) // page_size * page_size
    return FlashAttentionMetadata(
        cu_q_lens=jnp.arange(rows + 1, dtype=jnp.int32),
        cu_kv_lens=jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(aligned)]),
        page_indices=_pages_of(lengths, table, page_size, places),
        seq_lens=lengths,
        distribution=jnp.full(3, rows, jnp.int32),
    )
