"""Sends a batch to the engine's device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from enginepool.dispatch.request import MAX_NAMED_IDS
from enginepool.engine.grammar import RequestGrammar, open_mask
from enginepool.engine.steady.device_batch import DeviceBatch, Features, SamplingArrays
from enginepool.engine.steady.penalties import Penalties
from enginepool.engine.steady.sample import sampling_metadata

if TYPE_CHECKING:
    from sgl_jax.srt.model_executor.model_runner import ModelRunner
    from sgl_jax.srt.sampling.sampling_batch_info import SamplingMetadata


class BatchSender:
    """Sends batches to one engine's device. Used on the engine's thread."""

    def __init__(self, runner: ModelRunner, sizes: Iterable[int]) -> None:
        """
        Args:
            sizes: How many rows a batch can have.
        """
        self._mesh = runner.mesh
        self._vocab_size: int = runner.model_config.vocab_size
        # Sent once, because most batches have the same.
        self._flags = {value: self.place(np.bool_(value)) for value in (False, True)}
        self._no_names = {rows: self.place(no_names(rows)) for rows in sizes}
        self._no_mask = {rows: self.place(open_mask(self._vocab_size, rows)) for rows in sizes}

    def place(self, array: np.ndarray | np.generic) -> jax.Array:
        """Send an array that nobody changes any more. A CPU device uses the same memory."""
        everywhere = PartitionSpec(*[None] * array.ndim)
        return jax.device_put(array, NamedSharding(self._mesh, everywhere))

    def batch(
        self,
        limits: np.ndarray,
        block_table: np.ndarray,
        sampling: SamplingArrays,
        penalties: Penalties,
        names: np.ndarray,
        features: Features,
        adapters: tuple[np.ndarray, np.ndarray] | None,
    ) -> DeviceBatch:
        """Send a batch that allows all ids. The arrays may be changed afterwards."""
        size = len(limits)
        return DeviceBatch(
            self.place(limits.copy()),
            self.place(block_table.copy()),
            self._metadata(sampling, features),
            Penalties(*(self.place(array.copy()) for array in penalties)),
            self._flags[features.top],
            self._flags[features.named],
            self.place(names.copy()) if features.named else self._no_names[size],
            self._flags[features.kept],
            self._no_mask[size],
            None if adapters is None else (self.place(adapters[0]), self.place(adapters[1])),
        )

    def masked(self, batch: DeviceBatch, grammars: Mapping[int, RequestGrammar]) -> DeviceBatch:
        """The same batch, in which these rows get only ids that their grammars allow next."""
        mask = open_mask(self._vocab_size, len(batch.mask))
        for row, grammar in grammars.items():
            grammar.fill_vocab_mask(mask, row)
        return batch._replace(mask=self.place(mask))

    def _metadata(self, sampling: SamplingArrays, features: Features) -> SamplingMetadata:
        metadata = sampling_metadata(sampling, self._mesh, self._vocab_size)
        metadata.do_penalties = features.penalised or features.masked
        # Some of upstream's flags are Python values. JAX would send them with every step.
        return jax.tree.map(
            lambda leaf: leaf if isinstance(leaf, jax.Array) else self.place(np.asarray(leaf)),
            metadata,
        )


def no_names(rows: int) -> np.ndarray:
    """The `names` of so many rows, none of which names an id."""
    return np.zeros((rows, MAX_NAMED_IDS), np.int32)
