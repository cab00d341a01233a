"""Builds the programs of decode: a step, or several in a loop, and the state that it changes.

Reaches into upstream's model runner.

What breaks: See `program.py`.
Why: See there.
Remove when: See there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from enginepool.dispatch.routed_experts import Routing
from enginepool.engine.common_programs import CommonPrograms, OnAnyDevice
from enginepool.engine.steady.device_batch import (
    FROM_PREFILL,
    UNCHANGED,
    DecodeState,
    DeviceBatch,
    SentBatch,
    StepOutput,
)
from enginepool.engine.steady.forward import Forward, put
from enginepool.engine.steady.packing import limits_of, rest_of, rows_of, state_and_origin, unpack
from enginepool.engine.steady.sample import Sample, penalise_and_mask

if TYPE_CHECKING:
    from sgl_jax.srt.model_executor.model_runner import ModelRunner


def build_step(
    runner: ModelRunner,
    programs: CommonPrograms,
    kv_slots: dict[int, int],
    most_steps: int,
    routing: Routing | None,
) -> OnAnyDevice:
    # The program outlives a closed engine. So it must not hold the runner or an array.
    forward = Forward(runner, programs, kv_slots, routing)
    sample = Sample(runner)
    mesh = runner.mesh.abstract_mesh

    one = _build_one_step(mesh, forward, sample)

    @partial(jax.jit, donate_argnames=("kv", "state"))
    def step(
        leaves: list[jax.Array],
        kv: list[jax.Array],
        state: DecodeState,
        sent: SentBatch,
        samples: jax.Array,
        launch: jax.Array,
    ) -> Any:
        steps, new_rows = launch
        rows = state.rows.shape[1]
        state = _with_new_rows(mesh, state, sent.numbers, samples, new_rows > 0)
        batch = unpack(mesh, sent, rows, rest_of(sent.numbers, rows).reshape(rows, -1))
        if most_steps == 1:
            state, kv, sampled = one(leaves, kv, state, batch)
            return state, kv, jax.tree.map(lambda array: array[None], sampled)

        def goes_on(carried: Any) -> jax.Array:
            done, state, *_ = carried
            return (done < steps) & (state.rows[1] > 0).any()

        def another(carried: Any) -> Any:
            done, state, kv, sampled = carried
            state, kv, new = one(leaves, kv, state, batch)
            sampled = jax.tree.map(
                lambda a, b: jax.lax.dynamic_update_index_in_dim(a, b, done, axis=0), sampled, new
            )
            return done + 1, state, kv, sampled

        nothing = sample.nothing(most_steps, rows)
        if routing is not None:
            empty = jnp.zeros((most_steps, rows, *routing.shape), routing.dtype)
            nothing = nothing._replace(experts=put(mesh, empty, None, None, None, None))
        _, state, kv, sampled = jax.lax.while_loop(goes_on, another, (0, state, kv, nothing))
        return state, kv, sampled

    return programs.common(
        ["step", mesh, vars(forward), vars(sample), most_steps], lambda: OnAnyDevice(step)
    )


def _build_one_step(mesh: AbstractMesh, forward: Forward, sample: Sample) -> Callable[..., Any]:
    def one(
        leaves: list[jax.Array],
        kv: list[jax.Array],
        state: DecodeState,
        batch: DeviceBatch,
    ) -> tuple[DecodeState, list[jax.Array], StepOutput]:
        ids, lengths = state.rows
        lengths = jnp.where(batch.limits[:, 0] > 0, lengths, 0)
        output, kv, positions, experts = forward(
            leaves, kv, ids, lengths, batch.block_table, batch.adapters
        )
        output = penalise_and_mask(output, batch, state.tallies, lengths)
        ids, sampled = sample(output, positions, batch)
        counted = state.tallies.at[jnp.arange(len(ids)), ids].add(1)
        tallies = put(mesh, counted, None, None)
        goes_on = (lengths > 0) & ~_ended(ids, lengths + 1, batch.limits)
        rows = jnp.where(goes_on, jnp.stack([ids, lengths + 1]), 0)
        state = DecodeState(put(mesh, rows, None, None), tallies)
        return state, kv, sampled._replace(experts=experts)

    return one


def _ended(ids: jax.Array, lengths: jax.Array, limits: jax.Array) -> jax.Array:
    """Inside a program: by row, whether it ends with this id. `lengths` include the id."""
    return (ids[:, None] == limits[:, 1:]).any(axis=1) | (lengths >= limits[:, 0])


def build_begin(mesh: AbstractMesh, vocab_size: int, pages: int) -> Callable[..., Any]:
    @jax.jit
    def begin(numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
        state, _ = state_and_origin(numbers, rows_of(numbers, pages))
        tallies = jnp.zeros((state.shape[1], vocab_size), jnp.int32)
        return put(mesh, state, None, None), put(mesh, tallies, None, None)

    return OnAnyDevice(begin)


def _with_new_rows(
    mesh: AbstractMesh,
    state: DecodeState,
    numbers: jax.Array,
    samples: jax.Array,
    wanted: jax.Array,
) -> DecodeState:
    """Inside a program: the state, with the new rows of the batch that was sent. New rows are those
    that have an origin.

    Args:
        samples: The `StepOutput.ids` of the prefill that new rows come from, if any does.
        wanted: Whether there are such rows. Otherwise the state stays as it is.
    """
    rows = state.rows.shape[1]
    (ids, lengths), origin = state_and_origin(numbers, rows)
    origin = jnp.where(wanted, origin, UNCHANGED)
    sampled = origin >= FROM_PREFILL
    ids = jnp.where(sampled, samples[0, jnp.maximum(origin - FROM_PREFILL, 0)], ids)
    # The first id may end a row.
    over = sampled & _ended(ids, lengths, limits_of(numbers, rows))
    given = jnp.where(over, 0, jnp.stack([ids, lengths]))
    counted = state.tallies.at[jnp.arange(rows), ids].add(sampled.astype(jnp.int32))
    return DecodeState(
        put(mesh, jnp.where(origin == UNCHANGED, state.rows, given), None, None),
        put(mesh, counted, None, None),
    )
