"""A decode step as one program: forward, sampling, log-probabilities, who has ended, the advance.

Reaches into upstream's model runner, sampler and attention backends.

What breaks: A step of upstream's is three programs with the host between them, which sends every
array of the batch anew. While the host does that, the device waits.
Why: What a step needs is computed on the host from requests, also where it follows from the step
before. (Its overlap schedule hides that behind a second thread, and lets nothing run ahead where
log-probabilities are wanted.)
Remove when: A batch that stays the same stays on its device upstream, log-probabilities included.

`supported` looks for what is used here; where something is otherwise, steps are upstream's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from sgl_jax.srt.layers.attention.native_backend import NativeAttention
from sgl_jax.srt.layers.logits_processor import LogitsMetadata
from sgl_jax.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sgl_jax.srt.sampling.sampling_batch_info import SamplingMetadata
from sgl_jax.srt.speculative.spec_info import SpeculativeAlgorithm

# Stop ids of a row that the device looks for; the host looks for those of a row that has more.
STOP_IDS = 8


class Batch(NamedTuple):
    """A batch on its device, but for what a step changes.

    Attributes:
        limits: By row: the length at which it ends, 0 for a row that the host has ended; then its
            stop ids, -1 where there are none.
        table: By row: its KV pages.
        sampling: What upstream's sampler takes, but for the positions.
    """

    limits: jax.Array
    table: jax.Array
    sampling: SamplingMetadata


class StepProgram:
    """The program of one engine; on its thread.

    Attributes:
        buckets: Rows that a batch can have, ascending, and the KV slots that they all can have.
    """

    def __init__(self, scheduler: Any) -> None:
        worker = scheduler.tp_worker.worker
        self._runner = worker.model_runner
        self._pool = self._runner.token_to_kv_pool
        self._sampler = jax.tree.leaves(nnx.split(self._runner.sampler)[1])
        manager = worker.compilation_manager
        self.buckets = dict(zip(manager.bs_buckets, manager.cache_loc_buckets, strict=True))
        self._step = _build(self._runner, self.buckets)

    def bucket(self, requests: int) -> int:
        """Rows of a batch of so many requests."""
        return next(size for size in self.buckets if size >= requests)

    def no_batch(self, rows: int, pages: int, sampling: SamplingMetadata) -> Batch:
        """A batch of so many rows that are all empty."""
        limits = np.zeros((rows, 1 + STOP_IDS), np.int32)
        return Batch(self.place(limits), self.place(np.zeros((rows, pages), np.int32)), sampling)

    def place(self, array: np.ndarray) -> jax.Array:
        everywhere = PartitionSpec(*[None] * array.ndim)
        return jax.device_put(array, NamedSharding(self._runner.mesh, everywhere))

    def place_sampling(self, worker_batch: Any) -> SamplingMetadata:
        """What upstream sends for its sampler, with flags that are on the device, too."""
        runner = self._runner
        metadata = SamplingMetadata.from_model_worker_batch(
            worker_batch, 0, runner.mesh, runner.model_config.vocab_size
        )
        return jax.tree.map(
            lambda leaf: leaf if isinstance(leaf, jax.Array) else self.place(np.asarray(leaf)),
            metadata,
        )

    def step(self, state: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Dispatch a step.

        Args:
            state: By row: its last id, and its length with it, 0 for a row that is no more. It is
                given away.

        Returns:
            The state after the step, and by row the id that was sampled and the bits of its
            log-probability.
        """
        runner = self._runner
        state, buffers, sampled = self._step(
            runner.model_state_leaves,
            self._sampler,
            self._pool.kv_buffer,
            state,
            batch,
        )
        runner.memory_pools.replace_all(buffers)
        return state, sampled


def supported(scheduler: Any) -> bool:
    """Whether this upstream, this model and these options have all that the program is made of."""
    worker = scheduler.tp_worker.worker
    runner = worker.model_runner
    found = (
        all(hasattr(runner, name) for name in ("memory_pools", "_sampler_base_rng", "sampler"))
        and hasattr(worker, "compilation_manager")
        and hasattr(jax.sharding, "use_abstract_mesh")
    )
    if not found:
        return False
    # One pool of KV buffers by layer, and nothing else that a step carries on.
    buffers = getattr(runner.token_to_kv_pool, "kv_buffer", None)
    leaves = jax.tree.leaves(runner.memory_pools)
    one_pool = (
        isinstance(buffers, list)
        and len(buffers) == len(leaves)
        and all(one is other for one, other in zip(buffers, leaves, strict=True))
    )
    model_state = nnx.split(runner.model)[1]
    return (
        one_pool
        and len(jax.tree.leaves(model_state)) == len(runner.model_state_leaves)
        and type(runner.attn_backend) is NativeAttention
        and not getattr(runner, "is_hybrid", False)
    )


def _build(runner: Any, places: dict[int, int]) -> Callable[..., Any]:
    # Nothing here may hold the runner or an array: the program would outlive a closed engine.
    mesh, page_size = runner.mesh, runner.page_size
    model_def, model_state = nnx.split(runner.model)
    sampler_def, sampler_state = nnx.split(runner.sampler)
    model_tree, sampler_tree = map(jax.tree.structure, (model_state, sampler_state))
    pools_tree = jax.tree.structure(runner.memory_pools)
    backend, by_sorting = runner.attn_backend, runner.use_sort_for_toppk_minp
    unused_rng = np.asarray(runner._sampler_base_rng)  # every row has a seed

    def put(array: jax.Array, *spec: Any) -> jax.Array:
        return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec(*spec)))

    def forward(leaves: Any, kv: Any, ids: jax.Array, lengths: jax.Array, table: jax.Array) -> Any:
        rows = len(ids)
        live = lengths > 0
        positions = jnp.where(live, lengths - 1, 0)
        page = jnp.take_along_axis(table, (positions // page_size)[:, None], axis=1)[:, 0]
        slots = jnp.where(live, page * page_size + positions % page_size, -1)
        pools = jax.tree.unflatten(pools_tree, kv)
        forward_batch = ForwardBatch(
            bid=0,
            forward_mode=ForwardMode.DECODE,
            batch_size=rows,
            input_ids=put(ids, "data"),
            req_pool_indices=put(jnp.arange(rows, dtype=jnp.int32), "data"),
            seq_lens=put(lengths, "data"),
            out_cache_loc=put(slots, "data"),
            positions=put(positions, "data"),
            attn_backend=backend,
            cache_loc=put(_slots_of(lengths, table, page_size, places[rows]), "data"),
            spec_algorithm=SpeculativeAlgorithm.NONE,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        metadata = LogitsMetadata(
            forward_mode=ForwardMode.DECODE, capture_hidden_mode=CaptureHiddenMode.NULL
        )
        model = nnx.merge(model_def, jax.tree.unflatten(model_tree, leaves))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            output, updates, *_ = model(forward_batch, pools, metadata)
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

    def sample(leaves: Any, output: Any, positions: jax.Array, sampling: Any) -> Any:
        sampling.positions = put(positions, "data")
        sampler = nnx.merge(sampler_def, jax.tree.unflatten(sampler_tree, leaves))
        ids, logprobs, _ = sampler(
            output, sampling, use_sort_for_toppk_minp=by_sorting, rng_override=unused_rng
        )
        ids = put(ids, None).astype(jnp.int32)
        replicated = NamedSharding(mesh, PartitionSpec(None))
        logprobs = logprobs.at[jnp.arange(len(ids)), ids].get(out_sharding=replicated)
        return ids, logprobs.astype(jnp.float32)

    @partial(jax.jit, donate_argnames=("kv", "state"))
    def step(leaves: Any, sampler: Any, kv: Any, state: jax.Array, batch: Batch) -> Any:
        longest, stops = batch.limits[:, 0], batch.limits[:, 1:]
        ids, lengths = state
        lengths = jnp.where(longest > 0, lengths, 0)
        output, kv, positions = forward(leaves, kv, ids, lengths, batch.table)
        sampled, logprobs = sample(sampler, output, positions, batch.sampling)
        ended = (sampled[:, None] == stops).any(axis=1) | (lengths + 1 >= longest)
        goes_on = (lengths > 0) & ~ended
        state = put(jnp.where(goes_on, jnp.stack([sampled, lengths + 1]), 0), None, None)
        return state, kv, jnp.stack([sampled, jax.lax.bitcast_convert_type(logprobs, jnp.int32)])

    return step


def _slots_of(lengths: jax.Array, table: jax.Array, page_size: int, places: int) -> jax.Array:
    """The KV slots of all rows, row after row, each from the beginning of a page; then zeros."""
    pages = (lengths + page_size - 1) // page_size
    ends = jnp.cumsum(pages)
    place = jnp.arange(places // page_size)
    row = jnp.clip(jnp.searchsorted(ends, place, side="right"), 0, len(lengths) - 1)
    within = jnp.clip(place - (ends - pages)[row], 0, table.shape[1] - 1)
    page = jnp.where(place < ends[-1], table[row, within], 0)
    slots = page[:, None] * page_size + jnp.arange(page_size)
    return slots.reshape(-1).astype(jnp.int32)
