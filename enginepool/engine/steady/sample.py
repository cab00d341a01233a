"""Sampling, as a part of the step program.

Reaches into upstream's sampler and its metadata, which is made here from arrays.

What breaks: Sampling and log-probabilities are two programs, and the host runs between them.
Why: See `program.py`.
Remove when: With `program.py`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from sgl_jax.srt.sampling.sampling_batch_info import SamplingMetadata

from enginepool.dispatch.request import MAX_NAMED_IDS, MAX_TOP_LOGPROBS
from enginepool.dispatch.sampling_mask import MAX_KEPT_IDS
from enginepool.engine.common_programs import CommonPrograms
from enginepool.engine.sampling_mask import find_kept, no_kept
from enginepool.engine.steady.device_batch import DeviceBatch, StepOutput
from enginepool.engine.steady.forward import put
from enginepool.engine.steady.penalties import allowed, penalise

if TYPE_CHECKING:
    from sgl_jax.srt.layers.logits_processor import LogitsProcessorOutput
    from sgl_jax.srt.model_executor.model_runner import ModelRunner


class Sample:
    """Runs upstream's sampler inside a program, and computes log-probabilities.

    Like `Forward` it holds no device and no device array.
    """

    def __init__(self, runner: ModelRunner, programs: CommonPrograms) -> None:
        self._mesh = runner.mesh.abstract_mesh
        self._definition, state = programs.split(runner.sampler)
        self._tree = jax.tree.structure(state)
        self._by_sorting = runner.use_sort_for_toppk_minp
        self._width = min(MAX_TOP_LOGPROBS, runner.model_config.vocab_size)
        self._kept_width = min(MAX_KEPT_IDS, runner.model_config.vocab_size)
        self._unused_rng = np.asarray(runner._sampler_base_rng)  # every row has a seed

    def __call__(
        self,
        leaves: list[jax.Array],
        output: LogitsProcessorOutput,
        positions: jax.Array,
        batch: DeviceBatch,
    ) -> tuple[jax.Array, StepOutput]:
        """
        Args:
            leaves: The sampler's arrays.
            output: The forward pass's output, with penalties and masks applied.

        Returns:
            The sampled ids, and the step's output.
        """
        sampling: Any = batch.sampling  # Any, because its flags are arrays here
        sampling.positions = put(self._mesh, positions, "data")
        # Upstream's sampler must not apply them again. It still traces that branch.
        sampling.do_penalties, sampling.linear_penalty = False, jnp.zeros((), jnp.float32)
        sampling.apply_vocab_mask, sampling.vocab_mask = False, None
        sampler = nnx.merge(self._definition, jax.tree.unflatten(self._tree, leaves))
        ids, logprobs, _ = sampler(
            output,
            sampling,
            use_sort_for_toppk_minp=self._by_sorting,
            rng_override=self._unused_rng,
        )
        ids = put(self._mesh, ids, None).astype(jnp.int32)
        replicated = NamedSharding(self._mesh, PartitionSpec(None))
        own = logprobs.at[jnp.arange(len(ids)), ids].get(out_sharding=replicated)
        top = jax.lax.cond(batch.top, self._most_probable, self._no_top, logprobs)
        named = jax.lax.cond(batch.named, self._named, self._no_named, logprobs, batch.names)
        kept = jax.lax.cond(batch.kept, self._kept, self._no_kept, logprobs, sampling, ids)
        return ids, StepOutput(jnp.stack([ids, _bits(own)]), top, named, kept)

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

    def _kept(self, logprobs: jax.Array, sampling: Any, ids: jax.Array) -> jax.Array:
        by_row = {
            name: put(self._mesh, getattr(sampling, name), None)
            for name in ("top_ks", "top_ps", "min_ps")
        }
        whole = put(self._mesh, logprobs, None, None)
        found = find_kept(whole, SimpleNamespace(**by_row), ids, self._kept_width)
        return put(self._mesh, found, None, None)

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
        batch.sampling.do_penalties,
        lambda logits: allowed(penalise(logits, batch.penalties, tallies, lengths), batch.mask),
        lambda logits: logits,
        output.next_token_logits,
    )
    return output


def sampling_metadata(
    mesh: AbstractMesh, floats: jax.Array, ints: jax.Array, do_penalties: jax.Array
) -> SamplingMetadata:
    """Inside a program: the metadata of upstream's sampler, made from columns of a `RowTable`."""
    top_ks, min_ps = ints[:, 0], floats[:, 2]
    flags: Any = (top_ks <= 1).all(), (min_ps > 0).any()  # upstream declares Python values
    return SamplingMetadata(
        return_logprob=False,
        top_logprobs_nums=None,
        token_ids_logprobs=None,
        temperatures=put(mesh, floats[:, :1], "data", None),
        top_ps=put(mesh, floats[:, 1], "data"),
        top_ks=put(mesh, top_ks, "data"),
        min_ps=put(mesh, min_ps, "data"),
        sampling_seeds=put(mesh, ints[:, 1], "data"),
        positions=put(mesh, jnp.zeros_like(top_ks), "data"),
        is_all_greedy=flags[0],
        need_min_p_sampling=flags[1],
        do_penalties=do_penalties,  # pyright: ignore[reportArgumentType]
    )


def _bits(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)
