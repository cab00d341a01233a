"""A batch on its device: what the programs take and return."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from enginepool.engine.steady.penalties import Penalties
from enginepool.lora.adapter import NO_SLOT

if TYPE_CHECKING:
    import jax
    from sgl_jax.srt.sampling.sampling_params import SamplingParams

    from enginepool.dispatch.request import Request

# How many stop ids of a row the device looks for. If a row has more, the host looks for them.
STOP_IDS = 8

# The columns of a `RowTable`.
STATE, ORIGIN, LIMITS = slice(0, 2), 2, slice(3, 4 + STOP_IDS)
FLOATS, INTS = slice(4 + STOP_IDS, 10 + STOP_IDS), slice(10 + STOP_IDS, 14 + STOP_IDS)
COLUMNS = 14 + STOP_IDS

# Where a row's state comes from: it stays, it is in the table, or its id is the sample of row 0 of
# a prefill. Larger numbers stand for the prefill's rows 1, 2, ….
UNCHANGED, FROM_TABLE, FROM_PREFILL = 0, 1, 2


class RowTable:
    """The rows of a batch as the host sends them. They are one table of int32, so one transfer
    suffices. Floats are stored as their bits.

    Attributes:
        numbers: The table. The others are its columns.
        state: The last id, and the length with that id, when the row was given to a request.
        origin: From where the device takes the state at the next transfer.
        limits: The length at which a row ends, and its stop ids. The length is 0 if the host has
            ended the row. Unused stop ids are -1.
        penalties: See `penalties.py`.
    """

    def __init__(self, rows: int) -> None:
        self.numbers = np.zeros((rows, COLUMNS), np.int32)
        self.state, self.origin = self.numbers[:, STATE].T, self.numbers[:, ORIGIN]
        self.limits = self.numbers[:, LIMITS]
        self._floats = self.numbers[:, FLOATS].view(np.float32)
        self._ints = self.numbers[:, INTS]
        self.penalties = Penalties(self._floats[:, 3:5], self._ints[:, 2])
        # The values that upstream pads with.
        self._floats[:, :2] = 1
        self._ints[:, 0] = 1
        self._ints[:, 3] = NO_SLOT

    def set_adapter(self, row: int, slot: int, scale: float) -> None:
        """Set the slot of the row's adapter, and its scale."""
        self._ints[row, 3], self._floats[row, 5] = slot, scale

    def set_sampling(self, row: int, params: SamplingParams) -> None:
        """Set the row's sampling parameters to a request's."""
        self._floats[row, :3] = params.temperature, params.top_p, params.min_p
        seed: Any = params.sampling_seed  # every request of a pool has one
        # Modulo 2**32, as in patches/request_seed.py.
        self._ints[row, :2] = params.top_k, (int(seed) + 2**31) % 2**32 - 2**31


class SentBatch(NamedTuple):
    """The arrays of a batch that are sent. `unpack` reads them.

    Attributes:
        numbers: Its features, its `RowTable`, and its block table.
        names, mask: See `DeviceBatch`. Most batches have the same.
    """

    numbers: jax.Array
    names: jax.Array
    mask: jax.Array


class SamplingColumns(NamedTuple):
    """The sampling parameters of a batch, by row, with the names that upstream's sampler reads.

    Attributes:
        temperatures: In a column, [rows, 1].
        top_ks: 1 for a greedy row.
        top_ps: 1 or more keeps every id.
    """

    temperatures: jax.Array
    top_ks: jax.Array
    top_ps: jax.Array
    min_ps: jax.Array
    seeds: jax.Array


class DeviceBatch(NamedTuple):
    """The part of a batch that a step reads and does not change.

    Attributes:
        limits, penalties: See `RowTable`.
        block_table: By row: its KV pages.
        sampling: See `SamplingColumns`.
        penalised: Whether a row has penalties or a grammar.
        top: Whether a row wants the most probable ids.
        named: Whether a row names ids whose log-probabilities it wants.
        names: By row: these ids.
        kept: Whether a row wants the ids that it is sampled from.
        mask: By row: which ids may come next, a bit each.
        adapters: By row: its adapter's slot, and the scale.
    """

    limits: jax.Array
    penalties: Penalties
    block_table: jax.Array
    sampling: SamplingColumns
    penalised: jax.Array
    top: jax.Array
    named: jax.Array
    names: jax.Array
    kept: jax.Array
    mask: jax.Array
    adapters: tuple[jax.Array, jax.Array]


class Features(NamedTuple):
    """The features that at least one row of a batch needs. A step skips the others.

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

    @classmethod
    def of(cls, asking: Iterable[Request], *, penalised: bool, masked: bool) -> Self:
        """The features of a batch in which these requests want more values per token."""
        asking = list(asking)
        return cls(
            penalised=penalised,
            top=any(request.top_logprobs_num for request in asking),
            named=any(request.named_ids for request in asking),
            kept=any(request.return_sampling_mask for request in asking),
            masked=masked,
        )


class DecodeState(NamedTuple):
    """The part of a batch that a step changes. The next step takes over its buffers.

    Attributes:
        rows: By row: its last id, and its length with that id. The length is 0 if it has ended.
        tallies: See `penalties.py`. Undefined for rows without penalties.
    """

    rows: jax.Array
    tallies: jax.Array


class StepOutput(NamedTuple):
    """The results of a step.

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
