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
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from sgl_jax.srt.layers.logits_processor import LogitsMetadata
from sgl_jax.srt.managers.schedule_batch import ModelWorkerSamplingInfo
from sgl_jax.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sgl_jax.srt.sampling.sampling_batch_info import SamplingMetadata
from sgl_jax.srt.speculative.spec_info import SpeculativeAlgorithm

# Backends that look at a step's lengths, slots and pages, and at nothing else.
_ATTENTION = ("NativeAttention", "FlashAttention")
# Stop ids of a row that the device looks for; the host looks for those of a row that has more.
STOP_IDS = 8


@dataclass
class Sampling:
    """How every row samples, padded as upstream pads.

    Attributes:
        arrays: Upstream's own names, by row.
    """

    arrays: dict[str, np.ndarray]

    @classmethod
    def of(cls, rows: int) -> Self:
        """Of rows that are all empty."""
        return cls(
            {
                "temperatures": np.ones((rows, 1), np.float32),
                "top_ps": np.ones(rows, np.float32),
                "top_ks": np.ones(rows, np.int32),
                "min_ps": np.zeros(rows, np.float32),
                "sampling_seeds": np.zeros(rows, np.int32),
            }
        )

    def put(self, row: int, params: Any) -> None:
        """The row samples by a request's parameters."""
        arrays = self.arrays
        arrays["temperatures"][row] = params.temperature
        arrays["top_ps"][row] = params.top_p
        arrays["top_ks"][row] = params.top_k
        arrays["min_ps"][row] = params.min_p
        # As patches/request_seed.py has it: modulo 2**32.
        seed = np.uint32(int(params.sampling_seed) & 0xFFFFFFFF)
        arrays["sampling_seeds"][row] = seed.view(np.int32)


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
        self._seat = _build_seat(self._runner.mesh)

    def bucket(self, requests: int) -> int:
        """Rows of a batch of so many requests."""
        return next(size for size in self.buckets if size >= requests)

    def compile(self, pages: int) -> None:
        """Compile everything, for tables of so many pages a row; nothing of the engine changes."""
        for rows in self.buckets:
            limits = np.zeros((rows, 1 + STOP_IDS), np.int32)
            table = np.zeros((rows, pages), np.int32)
            batch = self.place_batch(limits, table, Sampling.of(rows))
            nobody = np.zeros((2, rows), np.int32)
            state, _ = self.step(self.place(nobody), batch)
            state, sampled = self.step(self.seat(state, [], nobody), batch)
            sampled.block_until_ready()

    def place(self, array: np.ndarray) -> jax.Array:
        everywhere = PartitionSpec(*[None] * array.ndim)
        return jax.device_put(array, NamedSharding(self._runner.mesh, everywhere))

    def place_batch(self, limits: np.ndarray, table: np.ndarray, sampling: Sampling) -> Batch:
        """Send a batch to the device; the arrays may be changed afterwards."""
        # Copied: on CPU an array on a device may be the very memory.
        limits, table = limits.copy(), table.copy()
        arrays: dict[str, Any] = {name: array.copy() for name, array in sampling.arrays.items()}
        runner = self._runner
        vocab_size = runner.model_config.vocab_size
        # Upstream's greedy way knows no temperature: with top_k=1 and one, its values are others.
        greedy = bool(((arrays["top_ks"] <= 1) & (arrays["temperatures"][:, 0] == 1)).all())
        info = ModelWorkerSamplingInfo(
            **arrays,
            vocab_size=vocab_size,
            is_all_greedy=greedy,
            need_min_p_sampling=bool((arrays["min_ps"] > 0).any()),
        )
        worker_batch: Any = SimpleNamespace(
            sampling_info=info,
            forward_mode=ForwardMode.DECODE,
            positions=np.zeros(len(limits), np.int32),
            seq_lens=None,
            return_logprob=False,
            top_logprobs_nums=None,
            token_ids_logprobs=None,
        )
        metadata = SamplingMetadata.from_model_worker_batch(
            worker_batch, 0, runner.mesh, vocab_size
        )
        # Upstream's flags are Python's, and would be sent with every step.
        metadata = jax.tree.map(
            lambda leaf: leaf if isinstance(leaf, jax.Array) else self.place(np.asarray(leaf)),
            metadata,
        )
        return Batch(self.place(limits), self.place(table), metadata)

    def seat(self, state: jax.Array, rows: list[int], seated: np.ndarray) -> jax.Array:
        """Put into these rows of a state, which is given away, what another has there."""
        new = np.zeros(state.shape[1], bool)
        new[rows] = True
        return self._seat(state, self.place(new), self.place(seated.copy()))

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
        and type(runner.attn_backend).__name__ in _ATTENTION
        and not hasattr(runner.attn_backend, "swa_index_mapping")
        and not getattr(runner, "is_hybrid", False)
    )


def _build(runner: Any, places: dict[int, int]) -> Callable[..., Any]:
    # Nothing here may hold the runner or an array: the program would outlive a closed engine.
    mesh, page_size = runner.mesh, runner.page_size
    model_def, model_state = nnx.split(runner.model)
    sampler_def, sampler_state = nnx.split(runner.sampler)
    model_tree, sampler_tree = map(jax.tree.structure, (model_state, sampler_state))
    pools_tree = jax.tree.structure(runner.memory_pools)
    backend_tree = jax.tree.structure(runner.attn_backend)
    kernel = type(runner.attn_backend).__name__ == "FlashAttention"
    by_sorting = runner.use_sort_for_toppk_minp
    unused_rng = np.asarray(runner._sampler_base_rng)  # every row has a seed

    def put(array: jax.Array, *spec: Any) -> jax.Array:
        return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec(*spec)))

    def forward(leaves: Any, kv: Any, ids: jax.Array, lengths: jax.Array, table: jax.Array) -> Any:
        rows = len(ids)
        live = lengths > 0
        positions = jnp.where(live, lengths - 1, 0)
        page = jnp.take_along_axis(table, (positions // page_size)[:, None], axis=1)[:, 0]
        slots = jnp.where(live, page * page_size + positions % page_size, -1)
        # A backend of the trace's own: upstream's would keep what is traced.
        backend: Any = jax.tree.unflatten(backend_tree, [None] * backend_tree.num_leaves)
        if kernel:
            metadata = _kernel_metadata(lengths, table, page_size, places[rows])
            metadata = jax.tree.map(lambda array: put(array, "data"), metadata)
            object.__setattr__(backend, "forward_metadata", metadata)
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
        wanted = LogitsMetadata(
            forward_mode=ForwardMode.DECODE, capture_hidden_mode=CaptureHiddenMode.NULL
        )
        model = nnx.merge(model_def, jax.tree.unflatten(model_tree, leaves))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            output, updates, *_ = model(forward_batch, pools, wanted)
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


def _build_seat(mesh: Any) -> Callable[..., Any]:
    everywhere = NamedSharding(mesh, PartitionSpec(None, None))

    @partial(jax.jit, donate_argnames="state")
    def seat(state: jax.Array, new: jax.Array, seated: jax.Array) -> jax.Array:
        return jax.sharding.reshard(jnp.where(new, seated, state), everywhere)

    return seat


def _pages_of(lengths: jax.Array, table: jax.Array, page_size: int, places: int) -> jax.Array:
    """The KV pages of all rows, row after row; then zeros."""
    pages = (lengths + page_size - 1) // page_size
    ends = jnp.cumsum(pages)
    place = jnp.arange(places // page_size)
    row = jnp.clip(jnp.searchsorted(ends, place, side="right"), 0, len(lengths) - 1)
    within = jnp.clip(place - (ends - pages)[row], 0, table.shape[1] - 1)
    return jnp.where(place < ends[-1], table[row, within], 0).astype(jnp.int32)


def _slots_of(lengths: jax.Array, table: jax.Array, page_size: int, places: int) -> jax.Array:
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
