"""Penalties, `min_new_tokens` and the masks of grammars, of a batch that stays on its device.

Reaches into upstream's penalizers.

What breaks: A batch with a penalty comes back to the host at every step: a table of the whole
vocabulary for every request is made there, and sent.
Why: What a request has said is counted on the host.
Remove when: With `program.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from enginepool.engine.common_programs import OnAnyDevice
from enginepool.model_config.generation import end_ids

# In a tally, beside how often the row has given an id: ids that would end it too early.
_BANNED = 1 << 30
# Entries of tallies that are sent at a time.
_ENTRIES = 2048


class Penalties(NamedTuple):
    """By row; zeros where there are none.

    Attributes:
        strengths: `presence_penalty` and `frequency_penalty`.
        least: The length before which the row must not end by an id.
    """

    strengths: Any
    least: Any

    @classmethod
    def of(cls, rows: int) -> Penalties:
        """Of rows that are all empty."""
        return cls(np.zeros((rows, 2), np.float32), np.zeros(rows, np.int32))

    def put(self, row: int, req: Any) -> bool:
        """The row has a request's; returns whether it has any."""
        params = req.sampling_params
        self.strengths[row] = params.presence_penalty, params.frequency_penalty
        least = params.min_new_tokens
        self.least[row] = len(req.origin_input_ids) + least if least > 0 else 0
        return bool(self.strengths[row].any() or least > 0)


def entries(rows: Sequence[int], reqs: Sequence[Any]) -> np.ndarray:
    """What the tallies of these rows begin with: row, id and amount of each."""
    found = [np.zeros((3, 0), np.int32)]
    for row in rows:
        req = reqs[row]
        found.append(_entries(row, req.output_ids, 1))
        if req.sampling_params.min_new_tokens > 0:
            found.append(_entries(row, sorted(_banned_ids(req)), _BANNED))
    return np.concatenate(found, axis=1)


def _entries(row: int, ids: Sequence[int], amount: int) -> np.ndarray:
    found = np.full((3, len(ids)), row, np.int32)
    found[1], found[2] = ids, amount
    return found


def _banned_ids(req: Any) -> set[int]:
    """What may not come until a request has its `min_new_tokens`: all that ends it by itself, also
    where it ignores that, as in upstream's prefill."""
    named = {*(req.sampling_params.stop_token_ids or ())}
    return named | end_ids(req.eos_token_ids, req.tokenizer)


def penalise(
    logits: jax.Array, penalties: Penalties, tallies: jax.Array, lengths: jax.Array
) -> jax.Array:
    """The logits of rows of these lengths, with what penalties add, in a program."""
    counts = tallies & (_BANNED - 1)
    presence, frequency = penalties.strengths[:, :1], penalties.strengths[:, 1:]
    costs = (counts > 0) * -presence + counts * -frequency
    early = (lengths < penalties.least)[:, None]
    added = jnp.where((tallies >= _BANNED) & early, -jnp.inf, costs)
    laid_out = jax.sharding.reshard(added, jax.typeof(logits).sharding)
    return logits + laid_out.astype(logits.dtype)


def allowed(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """The logits where the mask (see `Batch`) has a bit, else minus infinity, in a program."""
    ids = jnp.arange(logits.shape[1])
    bits = jnp.repeat(mask, 32, axis=1)[:, : len(ids)] >> (ids % 32) & 1
    laid_out = jax.sharding.reshard(bits == 1, jax.typeof(logits).sharding)
    return jnp.where(laid_out, logits, -jnp.inf)


def chunks(found: np.ndarray, rows: int) -> Iterator[np.ndarray]:
    """These entries in pieces of one size, padded with some that are no row's; one at least."""
    for start in range(0, max(1, found.shape[1]), _ENTRIES):
        part = found[:, start : start + _ENTRIES]
        padded = np.full((3, _ENTRIES), rows, np.int32)
        padded[:, : part.shape[1]] = part
        yield padded


def build_tally(mesh: AbstractMesh) -> Callable[..., jax.Array]:
    """A program for: tallies, which are given away, by row whether it begins anew, a chunk of
    entries."""
    everywhere = NamedSharding(mesh, PartitionSpec(None, None))

    @partial(jax.jit, donate_argnames="tallies")
    def tally(tallies: jax.Array, new: jax.Array, found: jax.Array) -> jax.Array:
        kept = jnp.where(new[:, None], 0, tallies)
        row, one, amount = found
        return jax.sharding.reshard(kept.at[row, one].add(amount, mode="drop"), everywhere)

    return OnAnyDevice(tally)


def recount(info: Any) -> None:
    """Bring upstream's penalizers up to date with its requests, as after its own step: it counts a
    token when it prepares the step after it."""
    sampling = info.sampling_info
    before = sampling.penalizer_orchestrator
    if not before.is_required:
        return
    counted = _Counted([_Told(req) for req in info.reqs])
    after = type(before)(before.vocab_size, counted, set(before.penalizers))
    after.reqs_info = info
    sampling.penalizer_orchestrator = after


class _Counted:
    """What upstream's penalizers look at, in the place of a batch."""

    def __init__(self, reqs: list[Any]) -> None:
        self.reqs = reqs


class _Told:
    """The same of a request, without its last token."""

    def __init__(self, req: Any) -> None:
        self.sampling_params, self.tokenizer = req.sampling_params, req.tokenizer
        self.eos_token_ids = req.eos_token_ids
        self.output_ids = req.output_ids[:-1]
