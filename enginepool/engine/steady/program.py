"""A whole decode step as one program.

It runs the forward (`forward.py`), samples (`sample.py`), ends rows and advances the others
(`decode_step.py`).

Reaches into upstream's model runner and sampler.

What breaks: A step of upstream's is three programs. Between them the host sends every array of the
batch again, and the device waits.
Why: Upstream computes a step's arguments from requests on the host, even where they follow from the
step before. (Its overlap schedule does that on a second thread. It runs no step ahead if a request
wants log-probabilities.)
Remove when: Upstream keeps an unchanged batch on the device, with log-probabilities.

`supported` checks for everything that is used here. If something is missing, upstream runs all
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from sgl_jax.srt.sampling.penaltylib import BatchedPenalizerOrchestrator

from enginepool.dispatch.routed_experts import Routing
from enginepool.engine.adapter_slots import AdapterSlots
from enginepool.engine.executable_cache import common_programs
from enginepool.engine.kv_cache import spec_of
from enginepool.engine.steady.block_table import BlockTable
from enginepool.engine.steady.decode_step import build_begin, build_step
from enginepool.engine.steady.device_batch import (
    DecodeState,
    Features,
    RowTable,
    SentBatch,
    StepOutput,
)
from enginepool.engine.steady.penalties import build_tally, chunks, entries
from enginepool.engine.steady.sender import BatchSender, no_names
from enginepool.lora.adapter import NO_SLOT, Adapter

if TYPE_CHECKING:
    from sgl_jax.srt.managers.scheduler import Scheduler

# Backends that need only the lengths, slots and pages of a step.
_ATTENTION = ("NativeAttention", "FlashAttention")


class StepProgram:
    """The step program of one engine. Used on the engine's thread.

    Attributes:
        buckets: By number of rows, ascending: how many KV slots a batch of that size can have.
        sender: Sends batches to the engine's device.
        with_experts: Whether steps return the experts of their tokens.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        most_steps: int,
        adapters: AdapterSlots | None,
        routing: Routing | None,
    ) -> None:
        """
        Args:
            most_steps: How many steps a launch can have.
            routing: How the model routes, if its experts are wanted.
        """
        worker = scheduler.tp_worker.worker
        self._adapters, self.with_experts = adapters, routing is not None
        self._runner = worker.model_runner
        self._pool: Any = self._runner.token_to_kv_pool  # `supported` has checked it
        manager = worker.compilation_manager
        self.buckets = dict(zip(manager.bs_buckets, manager.cache_loc_buckets, strict=True))
        programs = common_programs()
        self._step = build_step(self._runner, programs, self.buckets, most_steps, routing)
        self.sender = BatchSender(self._runner, self.buckets)
        self._pages = BlockTable.width(scheduler)
        self._place = self.sender.place
        # By the number of steps, by whether there are new rows. Sent once: a Python number would be
        # sent with every launch.
        self._launches = [
            [self._place(np.array([steps, new], np.int32)) for new in (False, True)]
            for steps in range(most_steps + 1)
        ]
        self._no_samples = self._place(np.zeros((2, manager.max_padded_batch_size), np.int32))
        mesh, vocab_size = self._runner.mesh.abstract_mesh, self._runner.model_config.vocab_size
        self._vocab_size: int = vocab_size
        about = mesh, vocab_size, self._pages
        self._begin = programs.common(["begin", *about], lambda: build_begin(*about))
        self._tally = programs.common(["tally", mesh], lambda: build_tally(mesh))

    def bucket(self, requests: int) -> int:
        """How many rows a batch of this many requests has."""
        return next(size for size in self.buckets if size >= requests)

    def ahead(self, rows: int) -> Callable[[], None]:
        """Prepare the compilation of a bucket's program, on the engine's thread.

        Returns:
            A function that compiles it, on any thread. It does not call the program. If two threads
            call one program, they may wait for each other. One compiles the program and waits for
            the limiter's slot. The other has the slot and waits in JAX for the compiled program.
        """
        kv = [spec_of(buffer) for buffer in self._pool.kv_buffer]
        # The state is only described. To make one compiles two programs, and other jobs would wait.
        state = DecodeState(*map(self._described, [(2, rows), (rows, self._vocab_size)]))
        leaves, batch = self._runner.model_state_leaves, self.empty(rows)
        args = leaves, kv, state, batch, self._no_samples, self._launches[1][False]
        return lambda: self._step.compile(*args)

    def _described(self, shape: tuple[int, ...]) -> Any:
        """Describe an array of the state. It stands in for the array in a compilation."""
        everywhere = NamedSharding(self._runner.mesh, PartitionSpec(*[None] * len(shape)))
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=everywhere)

    def compile(self) -> None:
        """Run every program once, on batches without requests. The engine does not change."""
        for rows in self.buckets:
            batch = self.empty(rows)
            state = self.tally(self.begin(batch.numbers), [], entries([], []))
            _, sampled = self.step(state, batch, 1)
            sampled.ids.block_until_ready()

    def empty(self, rows: int) -> SentBatch:
        """Send a batch without requests."""
        pages = np.zeros((rows, self._pages), np.int32)
        return self.sender.batch(RowTable(rows), pages, no_names(rows), Features())

    def adapter_row(self, adapter: Adapter | None) -> tuple[int, float]:
        """The slot and the scale of a row with this adapter."""
        return (NO_SLOT, 0.0) if self._adapters is None else self._adapters.row(adapter)

    def begin(self, numbers: jax.Array) -> DecodeState:
        """The state of a new batch, which was sent. All tallies are zero."""
        return DecodeState(*self._begin(numbers))

    def tally(self, state: DecodeState, rows: Sequence[int], found: np.ndarray) -> DecodeState:
        """Replace the tallies of these rows. It takes the old state's buffers over.

        Args:
            found: The first entries of the tallies, see `penalties.entries`.
        """
        size = state.rows.shape[1]
        new = np.zeros(size, bool)
        new[list(rows)] = True
        tallies = state.tallies
        for part in chunks(found, size):
            tallies = self._tally(tallies, self._place(new), self._place(part))
            new = np.zeros_like(new)
        return DecodeState(state.rows, tallies)

    def step(
        self,
        state: DecodeState,
        batch: SentBatch,
        steps: int,
        *,
        new_rows: bool = False,
        samples: jax.Array | None = None,
    ) -> tuple[DecodeState, StepOutput]:
        """Launch this many steps at once. They take over the old state's buffers.

        Args:
            new_rows: First replace the rows that have an origin in the batch.
            samples: The `StepOutput.ids` of the prefill that new rows come from, if any does.

        Returns:
            The state after them, and their output, by step.
        """
        runner = self._runner
        state, buffers, sampled = self._step(
            runner.model_state_leaves,
            self._pool.kv_buffer,
            state,
            batch,
            self._no_samples if samples is None else samples,
            self._launches[steps][new_rows],
        )
        runner.memory_pools.replace_all(buffers)
        return state, sampled


def supported(scheduler: Scheduler) -> bool:
    """Whether upstream, the model and the options have everything that the program needs."""
    worker = scheduler.tp_worker.worker
    runner = worker.model_runner
    found = (
        hasattr(runner, "memory_pools")
        and hasattr(worker, "compilation_manager")
        and hasattr(worker.compilation_manager, "_precompile_decode")
        and hasattr(worker.compilation_manager, "_precompile_extend")
        and hasattr(jax.sharding, "use_abstract_mesh")
        and hasattr(BatchedPenalizerOrchestrator, "reqs_info")
    )
    if not found:
        return False
    # Steps change one pool of KV buffers, one per layer, and nothing else.
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
        # In upstream's next version the backend changes the weights that its program gets.
        and not hasattr(runner.attn_backend, "prepare_model_state")
        and not getattr(runner, "is_hybrid", False)
    )
