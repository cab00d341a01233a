"""Computes log-probabilities of given tokens from hidden states, with bounded memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from enginepool.dispatch.request import MAX_NAMED_IDS, MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from sgl_jax.srt.layers.embeddings import Embed

# By target: its log-probability, the most probable ids' log-probabilities, these ids, and the named
# ids' log-probabilities.
type Scores = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

# Logits (float32, of the whole vocabulary) are computed for a slice of positions at a time. A slice
# has at most this many bytes, and at most the rows of a full sampling batch. It has at least 8
# positions.
LOGITS_BYTES = 128 * 2**20
_LEAST_ROWS = 8


# The arguments of the head travel as one array. These numbers come first.
_FLAGS = ("count", "top", "named")


def pack_wanted(tokens: int, wanted: Mapping[str, Any]) -> np.ndarray:
    """Packs the array that `ScoreHead` takes.

    Args:
        tokens: The bucket.
        wanted: A dict of arrays.
            `rows`: The rows of the hidden states that are scored. Their number is `count`.
            `targets`: For each of these rows, the id that comes next.
            `top`: Whether the most probable ids are wanted.
            `named`: Whether named ids are wanted.
            `names`: Rows of named ids.
            `whose`: For each of these rows, its row in `names`.
    """
    flags = len(wanted["rows"]), wanted["top"], wanted["named"]
    listed = np.zeros((3, tokens), np.int32)
    for line, name in zip(listed, ("rows", "targets", "whose"), strict=True):
        line[: len(wanted[name])] = wanted[name]
    return np.concatenate([np.array(flags, np.int32), listed.ravel(), wanted["names"].ravel()])


def bucket_of(numbers: jax.Array, batch: int) -> int:
    """The bucket that `pack_wanted` was given."""
    return (len(numbers) - len(_FLAGS) - batch * MAX_NAMED_IDS) // 3


def _unpack_wanted(numbers: jax.Array, batch: int) -> dict[str, jax.Array]:
    count, top, named = (numbers[place] for place in range(len(_FLAGS)))
    rest = numbers[len(_FLAGS) :]
    listed, names = jnp.split(rest, [len(rest) - batch * MAX_NAMED_IDS])
    rows, targets, whose = listed.reshape(3, -1)
    return {
        "count": count,
        "top": top > 0,
        "named": named > 0,
        "rows": rows,
        "targets": targets,
        "whose": whose,
        "names": names.reshape(batch, MAX_NAMED_IDS),
    }


class ScoreHead:
    """Wraps a model's logits processor. It returns what the processor returns, and
    log-probabilities of given tokens, which it computes for a slice of positions at a time.

    Args:
        numbers: What is wanted, see `pack_wanted`.
        batch: How many rows the largest sampling batch has.
    """

    def __init__(self, processor: Any, numbers: jax.Array, *, vocab_size: int, batch: int) -> None:
        self._processor, self._wanted = processor, _unpack_wanted(numbers, batch)
        wanted = self._wanted
        rows = max(_LEAST_ROWS, _power_of_two(min(LOGITS_BYTES // (4 * vocab_size), batch)))
        self._rows = min(rows, len(wanted["targets"]))
        self._width = min(MAX_TOP_LOGPROBS, vocab_size)

    def __call__(self, hidden_states: jax.Array, lm_head: Embed, *args: Any, **kwargs: Any) -> Any:
        """The processor's result, and the `Scores`. Scores that are not wanted are zeros."""
        output = self._processor(hidden_states, lm_head, *args, **kwargs)
        return output, self._scores(hidden_states, lm_head)

    def _scores(self, hidden_states: jax.Array, lm_head: Embed) -> Scores:
        wanted, rows = self._wanted, self._rows
        slices = -(-len(wanted["targets"]) // rows)
        padding = slices * rows - len(wanted["targets"])
        padded = {
            name: jnp.pad(wanted[name], (0, padding)) for name in ("rows", "targets", "whose")
        }
        hidden_states = jax.sharding.reshard(hidden_states, PartitionSpec("data", None))

        def one(place: jax.Array, scores: Scores) -> Scores:
            part = {
                name: jax.lax.dynamic_slice_in_dim(array, place * rows, rows)
                for name, array in padded.items()
            }
            which = jax.sharding.reshard(part["rows"], PartitionSpec("data"))
            picked = self._processor._select_hidden_states(hidden_states, which)
            new = self._slice(lm_head, picked, part["targets"], part["whose"])
            return jax.tree.map(
                lambda whole, some: jax.lax.dynamic_update_slice_in_dim(
                    whole, some, place * rows, axis=0
                ),
                scores,
                new,
            )

        needed = (wanted["count"] + rows - 1) // rows
        return jax.lax.fori_loop(0, needed, one, self._no_scores(slices * rows))

    def _slice(self, lm_head: Embed, hidden: jax.Array, ids: jax.Array, whose: jax.Array) -> Scores:
        replicated = PartitionSpec(None)
        logits = self._processor._get_logits(hidden, lm_head)
        if logits.dtype == jnp.bfloat16:
            # Round as a decode step does. XLA would keep more precision here.
            logits = jax.lax.reduce_precision(logits, 8, 7)
        logits = logits.astype(jnp.float32)
        # As `jax.nn.log_softmax` in a decode step, in its order, so that both round the same way.
        best = jax.sharding.reshard(logits.max(axis=-1), replicated)
        logits = logits - best[:, None]
        total = jax.sharding.reshard(jnp.log(jnp.exp(logits).sum(axis=-1)), replicated)
        own = logits.at[jnp.arange(len(ids)), ids].get(out_sharding=replicated)

        def top(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
            whole = jax.sharding.reshard(logits, PartitionSpec(None, None))
            values, best = jax.lax.top_k(whole, self._width)
            return values - total[:, None], best

        def named(logits: jax.Array) -> jax.Array:
            table = PartitionSpec(None, None)
            names = self._wanted["names"].at[whose].get(out_sharding=table)
            values = logits.at[jnp.arange(len(ids))[:, None], names].get(out_sharding=table)
            return values - total[:, None]

        _, *no_top, no_named = self._no_scores(len(ids))
        best = jax.lax.cond(self._wanted["top"], top, lambda _: tuple(no_top), logits)
        of_named = jax.lax.cond(self._wanted["named"], named, lambda _: no_named, logits)
        return own - total, *best, of_named

    def _no_scores(self, count: int) -> Scores:
        width = self._width
        zeros = (
            jnp.zeros(count, jnp.float32),
            jnp.zeros((count, width), jnp.float32),
            jnp.zeros((count, width), jnp.int32),
            jnp.zeros((count, MAX_NAMED_IDS), jnp.float32),
        )
        return tuple(
            jax.sharding.reshard(array, PartitionSpec(*[None] * array.ndim)) for array in zeros
        )


def _power_of_two(number: int) -> int:
    """The largest power of two up to a number; 0 for 0."""
    return 1 << max(0, number.bit_length() - 1) if number else 0
