"""A decode batch on its device: what the step program takes and returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

if TYPE_CHECKING:
    import jax
    from sgl_jax.srt.sampling.sampling_batch_info import SamplingMetadata
    from sgl_jax.srt.sampling.sampling_params import SamplingParams

    from enginepool.engine.steady.penalties import Penalties

# How many stop ids of a row the device looks for. If a row has more, the host looks for them.
STOP_IDS = 8


@dataclass
class SamplingArrays:
    """The sampling parameters of every row. Free rows have what upstream pads with.

    Attributes:
        arrays: By upstream's names: an array by row.
    """

    arrays: dict[str, np.ndarray]

    @classmethod
    def of(cls, rows: int) -> Self:
        """The parameters of free rows."""
        return cls(
            {
                "temperatures": np.ones((rows, 1), np.float32),
                "top_ps": np.ones(rows, np.float32),
                "top_ks": np.ones(rows, np.int32),
                "min_ps": np.zeros(rows, np.float32),
                "sampling_seeds": np.zeros(rows, np.int32),
            }
        )

    def set_row(self, row: int, params: SamplingParams) -> None:
        """Set the row's parameters to a request's."""
        arrays = self.arrays
        arrays["temperatures"][row] = params.temperature
        arrays["top_ps"][row] = params.top_p
        arrays["top_ks"][row] = params.top_k
        arrays["min_ps"][row] = params.min_p
        seed: Any = params.sampling_seed  # every request of a pool has one
        # Modulo 2**32, as in patches/request_seed.py.
        arrays["sampling_seeds"][row] = np.uint32(int(seed) & 0xFFFFFFFF).view(np.int32)


class DeviceBatch(NamedTuple):
    """What a step reads of a batch and does not change.

    Attributes:
        limits: By row: the length at which it ends, and its stop ids. The length is 0 if the host
            has ended the row. Unused stop ids are -1.
        block_table: By row: its KV pages.
        sampling: The arguments of upstream's sampler, without positions and mask. `do_penalties`
            says whether a row has penalties or a grammar.
        penalties: See `penalties.py`.
        top: Whether a row wants the most probable ids.
        named: Whether a row names ids whose log-probabilities it wants.
        names: By row: these ids.
        kept: Whether a row wants the ids that it is sampled from.
        mask: By row: which ids may come next, a bit each.
        adapters: By row: its adapter's slot, and the scale. None if the engine has no adapters.
    """

    limits: jax.Array
    block_table: jax.Array
    sampling: SamplingMetadata
    penalties: Penalties
    top: jax.Array
    named: jax.Array
    names: jax.Array
    kept: jax.Array
    mask: jax.Array
    adapters: tuple[jax.Array, jax.Array] | None


class Features(NamedTuple):
    """What at least one row of a batch needs. A step skips the others.

    Attributes:
        penalised: Penalties or `min_new_tokens`.
        top: The most probable ids.
        named: Log-probabilities of ids that the row names.
        kept: The ids that a token is sampled from.
        masked: A grammar's mask.
    """

    penalised: bool = False
    top: bool = False
    named: bool = False
    kept: bool = False
    masked: bool = False


class DecodeState(NamedTuple):
    """What a step changes of a batch. The next step takes its buffers over.

    Attributes:
        rows: By row: its last id, and its length with that id. The length is 0 if it has ended.
        tallies: See `penalties.py`. Undefined for rows without penalties.
    """

    rows: jax.Array
    tallies: jax.Array


class StepOutput(NamedTuple):
    """What a step samples.

    Attributes:
        ids: By row: the id, and the bits of its log-probability.
        top: By row: the most probable ids, and the bits of their log-probabilities. Zeros if no row
            wants them.
        named: By row: log-probabilities of the ids that it names. Zeros if no row names any.
        kept: By row: the ids that it was sampled from, see `engine/sampling_mask.py`. Zeros if no
            row wants them.
        experts: By row: the experts of the id before it, by layer with experts. None if the engine
            does not return them.
    """

    ids: jax.Array
    top: jax.Array
    named: jax.Array
    kept: jax.Array
    experts: jax.Array | None = None
