"""Penalties, `min_new_tokens` and the masks of grammars, computed on the device.

Reaches into upstream's penalizers.

What breaks: A batch with a penalty needs the host at every step. The host makes a table with the
whole vocabulary for every request, and sends it.
Why: Upstream counts a request's tokens on the host.
Remove when: With `program.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from enginepool.engine.common_programs import OnAnyDevice
from enginepool.model_config.generation import end_ids

if TYPE_CHECKING:
    from sgl_jax.srt.managers.schedule_batch import Req, ScheduleReqsInfo

# A tally counts how often each id was sampled for a row. This bit marks the ids that
# `min_new_tokens` bans.
_BANNED = 1 << 30
# How many entries of tallies are sent at a time.
_ENTRIES = 2048


class Penalties(NamedTuple):
    """The penalties of every row. Zeros mean none.

    Attributes:
        strengths: By row: `presence_penalty` and `frequency_penalty`.
        least: By row: the length that it must have before an id may end it.
    """

    strengths: Any
    least: Any

    def set_row(self, row: int, req: Req) -> bool:
        """Set the row's penalties to a request's. Returns whether it has any."""
        params = req.sampling_params
        self.strengths[row] = params.presence_penalty, params.frequency_penalty
        least = params.min_new_tokens
        self.least[row] = len(req.origin_input_ids) + least if least > 0 else 0
        return bool(self.strengths[row].any() or least > 0)


def entries(rows: Sequence[int], reqs: Sequence[Req]) -> np.ndarray:
    """The first entries of these rows' tallies. An entry is a row, an id and an amount.

    Args:
        reqs: By row: its request.
    """
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


def stop_ids(req: Req) -> list[int]:
    """The ids that end a request, as upstream's `check_finished` has them."""
    return [] if req.sampling_params.ignore_eos else sorted(_banned_ids(req))


def _banned_ids(req: Req) -> set[int]:
    """The ids that may not come before a request has its `min_new_tokens`.

    They are all ids that can end a request. Upstream's prefill bans them even if the request
    ignores its end ids.
    """
    named = {*(req.sampling_params.stop_token_ids or ())}
    return named | end_ids(req.eos_token_ids, req.tokenizer)


def penalise(
    logits: jax.Array, penalties: Penalties, tallies: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Inside a program: the logits with the penalties applied."""
    counts = tallies & (_BANNED - 1)
    presence, frequency = penalties.strengths[:, :1], penalties.strengths[:, 1:]
    costs = (counts > 0) * -presence + counts * -frequency
    early = (lengths < penalties.least)[:, None]
    added = jnp.where((tallies >= _BANNED) & early, -jnp.inf, costs)
    laid_out = jax.sharding.reshard(added, jax.typeof(logits).sharding)
    return logits + laid_out.astype(logits.dtype)


def allowed(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """Inside a program: the logits, minus infinity for ids that the mask forbids."""
    ids = jnp.arange(logits.shape[1])
    bits = jnp.repeat(mask, 32, axis=1)[:, : len(ids)] >> (ids % 32) & 1
    laid_out = jax.sharding.reshard(bits == 1, jax.typeof(logits).sharding)
    return jnp.where(laid_out, logits, -jnp.inf)


def chunks(found: np.ndarray, rows: int) -> Iterator[np.ndarray]:
    """Split entries into pieces of one size, at least one. The padding belongs to no row."""
    for start in range(0, max(1, found.shape[1]), _ENTRIES):
        part = found[:, start : start + _ENTRIES]
        padded = np.full((3, _ENTRIES), rows, np.int32)
        padded[:, : part.shape[1]] = part
        yield padded


def build_tally(mesh: AbstractMesh) -> Callable[..., jax.Array]:
    """Make the program that adds a piece of entries to the tallies, in the old tallies' buffers.

    Its second argument says by row whether its tally is first set to zero.
    """
    everywhere = NamedSharding(mesh, PartitionSpec(None, None))

    @partial(jax.jit, donate_argnames="tallies")
    def tally(tallies: jax.Array, new: jax.Array, found: jax.Array) -> jax.Array:
        kept = jnp.where(new[:, None], 0, tallies)
        row, one, amount = found
        return jax.sharding.reshard(kept.at[row, one].add(amount, mode="drop"), everywhere)

    return OnAnyDevice(tally)


def recount(info: ScheduleReqsInfo) -> None:
    """Make upstream's penalizers agree with its requests, as after a step of its own.

    Upstream counts a token when it prepares the next step. So the last token is not counted yet.
    """
    sampling = info.sampling_info
    before: Any = sampling.penalizer_orchestrator
    if not before.is_required:
        return
    counted = _Counted([_WithoutLastToken(req) for req in info.reqs])
    after = type(before)(before.vocab_size, counted, set(before.penalizers))
    after.reqs_info = info
    sampling.penalizer_orchestrator = after


class _Counted:
    """All that upstream's penalizers read of a batch."""

    def __init__(self, reqs: list[_WithoutLastToken]) -> None:
        self.reqs = reqs


class _WithoutLastToken:
    """All that they read of a request, without its last token."""

    def __init__(self, req: Req) -> None:
        self.sampling_params, self.tokenizer = req.sampling_params, req.tokenizer
        self.eos_token_ids = req.eos_token_ids
        self.output_ids = req.output_ids[:-1]
