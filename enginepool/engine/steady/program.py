"""A decode step as one program: forward, sampling, log-probabilities, who has ended, the advance.

Reaches into upstream's model runner and sampler; its forward is in `forward.py`, its sampling in
`sample.py`.

What breaks: A step of upstream's is three programs with the host between them, which sends every
array of the batch anew. While the host does that, the device waits.
Why: What a step needs is computed on the host from requests, also where it follows from the step
before. (Its overlap schedule hides that behind a second thread, and lets nothing run ahead where
log-probabilities are wanted.)
Remove when: A batch that stays the same stays on its device upstream, log-probabilities included.

`supported` looks for what is used here; where something is otherwise, steps are upstream's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from sgl_jax.srt.sampling.penaltylib import BatchedPenalizerOrchestrator

from enginepool.engine.common_programs import CommonPrograms, OnAnyDevice
from enginepool.engine.executable_cache import common_programs
from enginepool.engine.kv_cache import spec_of
from enginepool.engine.steady.batch import STOP_IDS, Batch, Form, Sampled, Sampling, State
from enginepool.engine.steady.forward import Forward, put
from enginepool.engine.steady.penalties import (
    Penalties,
    allowed,
    build_tally,
    chunks,
    entries,
    penalise,
)
from enginepool.engine.steady.sample import Sample
from enginepool.engine.steady.sender import BatchSender, no_names

# Backends that look at a step's lengths, slots and pages, and at nothing else.
_ATTENTION = ("NativeAttention", "FlashAttention")


class StepProgram:
    """The program of one engine; on its thread.

    Attributes:
        buckets: Rows that a batch can have, ascending, and the KV slots that they all can have.
        sender: Sends batches to where the program runs.
    """

    def __init__(self, scheduler: Any, most_steps: int) -> None:
        """
        Args:
            most_steps: That it takes when it is dispatched once.
        """
        worker = scheduler.tp_worker.worker
        self._runner = worker.model_runner
        self._pool = self._runner.token_to_kv_pool
        self._sampler = jax.tree.leaves(nnx.split(self._runner.sampler)[1])
        manager = worker.compilation_manager
        self.buckets = dict(zip(manager.bs_buckets, manager.cache_loc_buckets, strict=True))
        programs = common_programs()
        self._step = _build_step(self._runner, programs, self.buckets, most_steps)
        self.sender = BatchSender(self._runner, self.buckets)
        self._place = self.sender.place
        # On the device already: a number of Python's would be sent with every dispatch.
        self._counts = [self._place(np.int32(steps)) for steps in range(most_steps + 1)]
        mesh, vocab_size = self._runner.mesh.abstract_mesh, self._runner.model_config.vocab_size
        self._seat = programs.common(["seat", mesh], lambda: _build_seat(mesh))
        self._begin = programs.common(
            ["begin", mesh, vocab_size], lambda: _build_begin(mesh, vocab_size)
        )
        self._tally = programs.common(["tally", mesh], lambda: build_tally(mesh))

    def bucket(self, requests: int) -> int:
        """Rows of a batch of so many requests."""
        return next(size for size in self.buckets if size >= requests)

    def compile_ahead(self, pages: int) -> None:
        """Compile everything, for tables of so many pages a row, on any thread."""
        kv = [spec_of(buffer) for buffer in self._pool.kv_buffer]
        for rows in self.buckets:
            state, batch = self._empty(rows, pages)
            leaves = self._runner.model_state_leaves
            self._step.compile(leaves, self._sampler, kv, state, batch, self._counts[1])

    def compile(self, pages: int) -> None:
        """Run all of it once, on batches of nobody; nothing of the engine changes."""
        for rows in self.buckets:
            state, batch = self._empty(rows, pages)
            state, _ = self.step(state, batch, 1)
            state = self.seat(state, [], np.zeros((2, rows), np.int32))
            state, sampled = self.step(state, batch, 1)
            sampled.ids.block_until_ready()

    def _empty(self, rows: int, pages: int) -> tuple[State, Batch]:
        limits = np.zeros((rows, 1 + STOP_IDS), np.int32)
        table = np.zeros((rows, pages), np.int32)
        batch = self.sender.batch(
            limits, table, Sampling.of(rows), Penalties.of(rows), no_names(rows), Form()
        )
        state = self.begin(np.zeros((2, rows), np.int32))
        return self.tally(state, [], entries([], [])), batch

    def begin(self, rows: np.ndarray) -> State:
        """The state of a batch that nobody is counted in."""
        return State(*self._begin(self._place(rows.copy())))

    def seat(self, state: State, rows: list[int], seated: np.ndarray) -> State:
        """Put into these rows of a state, which is given away, what another has there."""
        new = np.zeros(seated.shape[1], bool)
        new[rows] = True
        return state._replace(
            rows=self._seat(state.rows, self._place(new), self._place(seated.copy()))
        )

    def tally(self, state: State, rows: Sequence[int], found: np.ndarray) -> State:
        """Count for these rows of a state, which is given away, from here on.

        Args:
            found: With what they begin, see `penalties.entries`.
        """
        size = state.rows.shape[1]
        new = np.zeros(size, bool)
        new[list(rows)] = True
        tallies = state.tallies
        for part in chunks(found, size):
            tallies = self._tally(tallies, self._place(new), self._place(part))
            new = np.zeros_like(new)
        return State(state.rows, tallies)

    def step(self, state: State, batch: Batch, steps: int) -> tuple[State, Sampled]:
        """Dispatch so many steps at once; the state is given away, for those after them."""
        runner = self._runner
        state, buffers, sampled = self._step(
            runner.model_state_leaves,
            self._sampler,
            self._pool.kv_buffer,
            state,
            batch,
            self._counts[steps],
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
        and hasattr(worker.compilation_manager, "_precompile_decode")
        and hasattr(jax.sharding, "use_abstract_mesh")
        and hasattr(BatchedPenalizerOrchestrator, "reqs_info")
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


def _build_step(
    runner: Any, programs: CommonPrograms, places: dict[int, int], most_steps: int
) -> OnAnyDevice:
    # Neither the runner nor an array: the program would outlive a closed engine.
    forward, sample = Forward(runner, programs, places), Sample(runner, programs)
    mesh = runner.mesh.abstract_mesh

    def one(leaves: Any, sampler: Any, kv: Any, state: State, batch: Batch) -> Any:
        longest, stops = batch.limits[:, 0], batch.limits[:, 1:]
        ids, lengths = state.rows
        lengths = jnp.where(longest > 0, lengths, 0)
        output, kv, positions = forward(leaves, kv, ids, lengths, batch.table)
        output.next_token_logits = jax.lax.cond(
            batch.sampling.do_penalties,
            lambda logits: allowed(
                penalise(logits, batch.penalties, state.tallies, lengths), batch.mask
            ),
            lambda logits: logits,
            output.next_token_logits,
        )
        ids, sampled = sample(sampler, output, positions, batch)
        counted = state.tallies.at[jnp.arange(len(ids)), ids].add(1)
        tallies = put(mesh, counted, None, None)
        ended = (ids[:, None] == stops).any(axis=1) | (lengths + 1 >= longest)
        goes_on = (lengths > 0) & ~ended
        rows = jnp.where(goes_on, jnp.stack([ids, lengths + 1]), 0)
        return State(put(mesh, rows, None, None), tallies), kv, sampled

    @partial(jax.jit, donate_argnames=("kv", "state"))
    def step(
        leaves: Any, sampler: Any, kv: Any, state: State, batch: Batch, steps: jax.Array
    ) -> Any:
        if most_steps == 1:
            state, kv, sampled = one(leaves, sampler, kv, state, batch)
            return state, kv, jax.tree.map(lambda array: array[None], sampled)

        def goes_on(carried: Any) -> jax.Array:
            done, state, *_ = carried
            return (done < steps) & (state.rows[1] > 0).any()

        def another(carried: Any) -> Any:
            done, state, kv, sampled = carried
            state, kv, new = one(leaves, sampler, kv, state, batch)
            return done + 1, state, kv, jax.tree.map(lambda a, b: a.at[done].set(b), sampled, new)

        nothing = sample.nothing(most_steps, state.rows.shape[1])
        _, state, kv, sampled = jax.lax.while_loop(goes_on, another, (0, state, kv, nothing))
        return state, kv, sampled

    return programs.common(
        ["step", mesh, vars(forward), vars(sample), most_steps], lambda: OnAnyDevice(step)
    )


def _build_begin(mesh: AbstractMesh, vocab_size: int) -> Callable[..., Any]:
    @jax.jit
    def begin(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        tallies = jnp.zeros((rows.shape[1], vocab_size), jnp.int32)
        return rows, put(mesh, tallies, None, None)

    return OnAnyDevice(begin)


def _build_seat(mesh: AbstractMesh) -> Callable[..., Any]:
    everywhere = NamedSharding(mesh, PartitionSpec(None, None))

    @partial(jax.jit, donate_argnames="state")
    def seat(state: jax.Array, new: jax.Array, seated: jax.Array) -> jax.Array:
        return jax.sharding.reshard(jnp.where(new, seated, state), everywhere)

    return OnAnyDevice(seat)
