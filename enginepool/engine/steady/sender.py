"""Sends a batch to the engine's device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from sgl_jax.srt.model_executor import forward_batch_info

from enginepool.dispatch.request import MAX_NAMED_IDS
from enginepool.engine.grammar import RequestGrammar, open_mask
from enginepool.engine.steady.device_batch import Features, RowTable, SentBatch
from enginepool.engine.steady.packing import pack

if TYPE_CHECKING:
    from sgl_jax.srt.model_executor.model_runner import ModelRunner


class BatchSender:
    """Sends batches to one engine's device. Used on the engine's thread."""

    def __init__(self, runner: ModelRunner, sizes: Iterable[int]) -> None:
        """
        Args:
            sizes: How many rows a batch can have.
        """
        # By number of dimensions: the sharding that puts the whole array on every device.
        self._shardings = [
            NamedSharding(runner.mesh, PartitionSpec(*[None] * ndim)) for ndim in range(3)
        ]
        self._vocab_size: int = runner.model_config.vocab_size
        # Sent once, because most batches have the same.
        self._no_names = {rows: self.place(no_names(rows)) for rows in sizes}
        self._no_mask = {rows: self.place(open_mask(self._vocab_size, rows)) for rows in sizes}

    def place(self, array: np.ndarray | np.generic) -> jax.Array:
        """Send an array. The caller must not change it afterwards: a CPU device uses its memory."""
        # By upstream's own function, which patches/batch_transfers.py makes quick.
        return forward_batch_info.device_array(array, sharding=self._shardings[array.ndim])

    def batch(
        self,
        table: RowTable,
        block_table: np.ndarray,
        names: np.ndarray,
        features: Features,
    ) -> SentBatch:
        """Send a batch that allows all ids. The arrays may be changed afterwards."""
        rows = len(names)
        return SentBatch(
            self.place(pack(features, table, block_table)),
            self.place(names.copy()) if features.named else self._no_names[rows],
            self._no_mask[rows],
        )

    def defaults(self, rows: int) -> tuple[jax.Array, jax.Array]:
        """The `names` and the `mask` of rows that name no ids and allow all."""
        return self._no_names[rows], self._no_mask[rows]

    def masked(self, batch: SentBatch, grammars: Mapping[int, RequestGrammar]) -> SentBatch:
        """The same batch, in which these rows get only ids that their grammars allow next."""
        mask = open_mask(self._vocab_size, len(batch.mask))
        for row, grammar in grammars.items():
            grammar.fill_vocab_mask(mask, row)
        return batch._replace(mask=self.place(mask))


def no_names(rows: int) -> np.ndarray:
    """The `names` of this many rows, none of which names an id."""
    return np.zeros((rows, MAX_NAMED_IDS), np.int32)
