"""A batch that stays on its device: what the step program takes and gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

if TYPE_CHECKING:
    import jax
    from sgl_jax.srt.sampling.sampling_batch_info import SamplingMetadata

    from enginepool.engine.steady.penalties import Penalties

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
        sampling: What upstream's sampler takes, but for positions and mask; as `do_penalties`
            whether any row has penalties or a grammar.
        penalties: See `penalties.py`.
        top: Whether a row wants the most probable ids.
        named, names: Whether a row names ids whose log-probabilities it wants, and by row which.
        mask: By row: which ids may come next, a bit each.
    """

    limits: jax.Array
    table: jax.Array
    sampling: SamplingMetadata
    penalties: Penalties
    top: jax.Array
    named: jax.Array
    names: jax.Array
    mask: jax.Array


class Form(NamedTuple):
    """Whether any row of a batch has this; a step without it does not compute it.

    Attributes:
        penalised: Penalties, or `min_new_tokens`.
        top: The most probable ids are wanted.
        named: Log-probabilities of ids that it names are.
        masked: A grammar.
    """

    penalised: bool = False
    top: bool = False
    named: bool = False
    masked: bool = False


class State(NamedTuple):
    """What a step changes of a batch; it is given away to the next one.

    Attributes:
        rows: By row: its last id, and its length with it, 0 for a row that is no more.
        tallies: See `penalties.py`; whatever they are of rows without penalties.
    """

    rows: jax.Array
    tallies: jax.Array


class Sampled(NamedTuple):
    """What a step brings.

    Attributes:
        ids: By row: the id, and the bits of its log-probability.
        top: The same of the most probable ids, if the batch wants them; else zeros.
        named: By row: log-probabilities of the ids that it names, if any does; else zeros.
    """

    ids: jax.Array
    top: jax.Array
    named: jax.Array
