"""A prefill step of upstream's model, as a part of the prefill program.

Reaches into upstream's models and attention backends.

What breaks: A prefill sends sixteen arrays. Most of them are functions of three.
Why: Upstream computes positions, slots and pages from requests, on the host.
Remove when: With `program.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from sgl_jax.srt.layers.logits_processor import LogitsMetadata
from sgl_jax.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sgl_jax.srt.speculative.spec_info import SpeculativeAlgorithm

from enginepool.dispatch.routed_experts import Routing
from enginepool.engine.common_programs import CommonPrograms
from enginepool.engine.steady.forward import Model, put, round_logits
from enginepool.lora.adapter import NO_SLOT

if TYPE_CHECKING:
    from sgl_jax.srt.model_executor.model_runner import ModelRunner


class Prompts(NamedTuple):
    """The prompts of a prefill, on the device. Free rows come last.

    Attributes:
        lengths: By row: how many tokens have KV cache after this step.
        prefixes: By row: how many had it before.
        pages: The KV pages of all rows, one row after the other.
        ids: The ids that are computed, one row after the other.
        adapters: By row: its adapter's slot, and the scale.
    """

    lengths: jax.Array
    prefixes: jax.Array
    pages: jax.Array
    ids: jax.Array
    adapters: tuple[jax.Array, jax.Array]


class Extend:
    """Runs upstream's model inside a program, on prompts that are on the device."""

    def __init__(
        self, runner: ModelRunner, programs: CommonPrograms, routing: Routing | None
    ) -> None:
        """
        Args:
            routing: See `Model`.
        """
        self._model = Model(runner, programs, routing)
        self.mesh = self._model.mesh

    def __call__(
        self,
        leaves: list[jax.Array],
        kv: list[jax.Array],
        prompts: Prompts,
        head: Callable[[Any], Any] | None,
    ) -> tuple[Any, list[jax.Array], jax.Array | None]:
        """
        Args:
            leaves: The model's arrays.
            kv: The KV buffers.
            head: Wraps the model's logits processor.

        Returns:
            The model's output, the KV buffers, and the experts of each id, if they are wanted. With
            a head its scores are beside the output.
        """
        mesh, lengths = self._model.mesh, prompts.lengths
        computed = lengths - prompts.prefixes
        ends = jnp.cumsum(computed)
        last = jnp.where(lengths > 0, ends - 1, 0)
        wanted = LogitsMetadata(
            forward_mode=ForwardMode.EXTEND,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            extend_seq_lens=put(mesh, computed, "data"),
            logits_indices=put(mesh, last, "data"),
        )
        batch = self._batch(prompts, computed, ends)
        output, kv, experts = self._model(leaves, kv, batch, wanted, head)
        round_logits(output if head is None else output[0])
        return output, kv, experts

    def _batch(self, prompts: Prompts, computed: jax.Array, ends: jax.Array) -> ForwardBatch:
        """The batch that upstream would make on the host."""
        mesh, size = self._model.mesh, self._model.page_size
        lengths, prefixes, pages, ids, (adapters, scales) = prompts
        rows = len(lengths)
        aligned = (lengths + size - 1) // size * size
        token = jnp.arange(len(ids), dtype=jnp.int32)
        row = jnp.clip(
            jnp.searchsorted(ends, token, side="right", method="compare_all"), 0, rows - 1
        )
        there = token < ends[-1]
        positions = jnp.where(there, prefixes[row] + token - (ends - computed)[row], 0)
        first = ((jnp.cumsum(aligned) - aligned) // size)[row]
        page = pages[jnp.clip(first + positions // size, 0, len(pages) - 1)]
        within = jnp.arange(size, dtype=jnp.int32)
        slots = (pages[:, None] * size + jnp.where(pages[:, None] > 0, within, 0)).reshape(-1)
        active = (lengths > 0).sum(dtype=jnp.int32)
        zero = jnp.zeros(1, jnp.int32)
        backend = self._model.backend(
            cu_q_lens=jnp.concatenate([zero, ends]),
            cu_kv_lens=jnp.concatenate([zero, jnp.cumsum(aligned)]),
            page_indices=pages,
            seq_lens=lengths,
            distribution=jnp.stack([jnp.zeros((), jnp.int32), active, active]),
        )
        batch = ForwardBatch(
            bid=0,
            forward_mode=ForwardMode.EXTEND,
            batch_size=rows,
            input_ids=put(mesh, ids, "data"),
            req_pool_indices=put(mesh, jnp.arange(rows, dtype=jnp.int32), "data"),
            seq_lens=put(mesh, lengths, "data"),
            out_cache_loc=put(mesh, jnp.where(there, page * size + positions % size, -1), "data"),
            positions=put(mesh, positions, "data"),
            attn_backend=backend,
            cache_loc=put(mesh, slots, "data"),
            extend_prefix_lens=put(mesh, prefixes, "data"),
            extend_seq_lens=put(mesh, computed, "data"),
            spec_algorithm=SpeculativeAlgorithm.NONE,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        self._model.adapt(batch, jnp.where(there, adapters[row], NO_SLOT), scales[row])
        return batch
