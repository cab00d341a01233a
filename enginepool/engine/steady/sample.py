"""Sampling, as a part of the step program.

Reaches into upstream's sampler: its greedy path, its masks and its seeded draw are called.

What breaks: Sampling and log-probabilities are two programs, and the host runs between them. And
upstream's top-k and top-p read the logits 64 times at each step, even if no row uses them.
Why: See `program.py`. Upstream's sampler applies every filter to every batch that is not greedy.
Remove when: With `program.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from sgl_jax.srt.layers import sampler as upstream

from enginepool.dispatch.request import MAX_NAMED_IDS, MAX_TOP_LOGPROBS
from enginepool.dispatch.sampling_mask import MAX_KEPT_IDS
from enginepool.engine.sampling_mask import at_least, least_kept, list_kept, no_kept
from enginepool.engine.steady.device_batch import DeviceBatch, SamplingColumns, StepOutput
from enginepool.engine.steady.forward import put
from enginepool.engine.steady.penalties import allowed, penalise

if TYPE_CHECKING:
    from sgl_jax.srt.layers.logits_processor import LogitsProcessorOutput
    from sgl_jax.srt.model_executor.model_runner import ModelRunner


class Sample:
    """Samples as upstream's sampler does, inside a program, and computes log-probabilities.

    Like `Forward` it holds no device and no device array.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._mesh = runner.mesh.abstract_mesh
        self._width = min(MAX_TOP_LOGPROBS, runner.model_config.vocab_size)
        self._kept_width = min(MAX_KEPT_IDS, runner.model_config.vocab_size)

    def __call__(
        self, output: LogitsProcessorOutput, positions: jax.Array, batch: DeviceBatch
    ) -> tuple[jax.Array, StepOutput]:
        """
        Args:
            output: The forward pass's output, with penalties and masks applied.

        Returns:
            The sampled ids, and the step's output.
        """
        logits, sampling = output.next_token_logits, batch.sampling
        # With patches/batch_dependence.py these are the log-probabilities of every row.
        greedily: Any = upstream.Sampler._greedy_sampling  # it does not use its `self`
        best, logprobs = greedily(None, (logits, sampling, None))
        best = put(self._mesh, best, None).astype(jnp.int32)
        greedy = (sampling.top_ks <= 1).all()
        ids, least = jax.lax.cond(
            greedy, self._best, self._drawn, best, logits, positions, sampling
        )
        replicated = NamedSharding(self._mesh, PartitionSpec(None))
        own = logprobs.at[jnp.arange(len(ids)), ids].get(out_sharding=replicated)
        top = jax.lax.cond(batch.top, self._most_probable, self._no_top, logprobs)
        named = jax.lax.cond(batch.named, self._named, self._no_named, logprobs, batch.names)
        kept = jax.lax.cond(
            batch.kept, self._kept, self._no_kept, logprobs, logits, sampling, least, ids
        )
        return ids, StepOutput(jnp.stack([ids, _bits(own)]), top, named, kept)

    def _best(self, best: jax.Array, *_: Any) -> tuple[jax.Array, jax.Array]:
        return best, put(self._mesh, jnp.full(len(best), jnp.inf), None)

    def _drawn(
        self, best: jax.Array, logits: jax.Array, positions: jax.Array, sampling: SamplingColumns
    ) -> tuple[jax.Array, jax.Array]:
        """Draw the ids of rows that are not greedy. Returns also `least_kept`."""
        divided = self._divided(logits, sampling)
        least = least_kept(divided, sampling)
        left = at_least(divided, least)
        drawn = upstream.multinomial_with_seed((left, sampling.seeds, positions, None, False))
        drawn = put(self._mesh, drawn, None, None).flatten().astype(jnp.int32)
        return jnp.where(sampling.top_ks > 1, drawn, best), least

    def _divided(self, logits: jax.Array, sampling: SamplingColumns) -> jax.Array:
        """The logits after the temperature."""
        whole = put(self._mesh, logits, None, None)
        return whole.astype(jnp.float32) / sampling.temperatures

    def _most_probable(self, logprobs: jax.Array) -> jax.Array:
        values, ids = jax.lax.top_k(put(self._mesh, logprobs, None, None), self._width)
        return put(self._mesh, jnp.stack([ids, _bits(values)]), None, None, None)

    def _no_top(self, logprobs: jax.Array) -> jax.Array:
        zeros = jnp.zeros((2, len(logprobs), self._width), jnp.int32)
        return put(self._mesh, zeros, None, None, None)

    def _named(self, logprobs: jax.Array, names: jax.Array) -> jax.Array:
        table = NamedSharding(self._mesh, PartitionSpec(None, None))
        rows = jnp.arange(len(names))[:, None]
        return logprobs.at[rows, names].get(out_sharding=table).astype(jnp.float32)

    def _no_named(self, _: jax.Array, names: jax.Array) -> jax.Array:
        return put(self._mesh, jnp.zeros(names.shape, jnp.float32), None, None)

    def _kept(
        self,
        logprobs: jax.Array,
        logits: jax.Array,
        sampling: SamplingColumns,
        least: jax.Array,
        ids: jax.Array,
    ) -> jax.Array:
        left = at_least(self._divided(logits, sampling), least) > -jnp.inf
        whole = put(self._mesh, logprobs, None, None)
        return put(self._mesh, list_kept(left, whole, ids, self._kept_width), None, None)

    def _no_kept(self, logprobs: jax.Array, *_: Any) -> jax.Array:
        return put(self._mesh, no_kept(len(logprobs), self._kept_width), None, None)

    def nothing(self, steps: int, rows: int) -> StepOutput:
        """The empty output of this many steps."""
        zeros = jnp.zeros((steps, 2, rows, self._width), jnp.int32)
        named = jnp.zeros((steps, rows, MAX_NAMED_IDS), jnp.float32)
        kept = no_kept(steps * rows, self._kept_width).reshape(steps, rows, -1)
        return StepOutput(
            put(self._mesh, zeros[..., 0], None, None, None),
            put(self._mesh, zeros, None, None, None, None),
            put(self._mesh, named, None, None, None),
            put(self._mesh, kept, None, None, None),
        )


def penalise_and_mask(
    output: LogitsProcessorOutput, batch: DeviceBatch, tallies: jax.Array, lengths: jax.Array
) -> LogitsProcessorOutput:
    """Inside a program: the model's output with penalties and masks applied, if there are any."""
    output.next_token_logits = jax.lax.cond(
        batch.penalised,
        lambda logits: allowed(penalise(logits, batch.penalties, tallies, lengths), batch.mask),
        lambda logits: logits,
        output.next_token_logits,
    )
    return output


def sampling_columns(mesh: AbstractMesh, floats: jax.Array, ints: jax.Array) -> SamplingColumns:
    """Inside a program: the sampling parameters, from columns of a `RowTable`."""
    return SamplingColumns(
        temperatures=put(mesh, floats[:, :1], None, None),
        top_ps=put(mesh, floats[:, 1], None),
        min_ps=put(mesh, floats[:, 2], None),
        top_ks=put(mesh, ints[:, 0], None),
        seeds=put(mesh, ints[:, 1], None),
    )


def _bits(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)
