"""What a steady step reads of a batch, sent to the engine's device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from enginepool.dispatch.request import MAX_NAMED_IDS
from enginepool.engine.grammar import RequestGrammar, open_mask
from enginepool.engine.steady.batch import Batch, Form, Sampling
from enginepool.engine.steady.penalties import Penalties
from enginepool.engine.steady.sample import sampling_metadata


class BatchSender:
    """To the device of one engine; on its thread."""

    def __init__(self, runner: Any, sizes: Iterable[int]) -> None:
        """
        Args:
            sizes: Rows that a batch can have.
        """
        self._mesh = runner.mesh
        self._vocab_size: int = runner.model_config.vocab_size
        # On the device already: what is the same for most batches would be sent with each.
        self._flags = {value: self.place(np.bool_(value)) for value in (False, True)}
        self._no_names = {rows: self.place(no_names(rows)) for rows in sizes}
        self._no_mask = {rows: self.place(open_mask(self._vocab_size, rows)) for rows in sizes}

    def place(self, array: np.ndarray | np.generic) -> jax.Array:
        """Send an array that nobody changes any more: on CPU the device has the very memory."""
        everywhere = PartitionSpec(*[None] * array.ndim)
        return jax.device_put(array, NamedSharding(self._mesh, everywhere))

    def batch(
        self,
        limits: np.ndarray,
        table: np.ndarray,
        sampling: Sampling,
        penalties: Penalties,
        names: np.ndarray,
        form: Form,
    ) -> Batch:
        """Send a batch, but for the mask of its grammars; the arrays may be changed afterwards."""
        size = len(limits)
        return Batch(
            self.place(limits.copy()),
            self.place(table.copy()),
            self._metadata(sampling, form),
            Penalties(*(self.place(array.copy()) for array in penalties)),
            self._flags[form.top],
            self._flags[form.named],
            self.place(names.copy()) if form.named else self._no_names[size],
            self._no_mask[size],
        )

    def masked(self, batch: Batch, grammars: Mapping[int, RequestGrammar]) -> Batch:
        """The same batch, of which these rows may get what their grammars let them get next."""
        mask = open_mask(self._vocab_size, len(batch.mask))
        for row, grammar in grammars.items():
            grammar.fill_vocab_mask(mask, row)
        return batch._replace(mask=self.place(mask))

    def _metadata(self, sampling: Sampling, form: Form) -> Any:
        metadata = sampling_metadata(sampling, self._mesh, self._vocab_size)
        metadata.do_penalties = form.penalised or form.masked
        # Upstream's flags are Python's, and would be sent with every step.
        return jax.tree.map(
            lambda leaf: leaf if isinstance(leaf, jax.Array) else self.place(np.asarray(leaf)),
            metadata,
        )


def no_names(rows: int) -> np.ndarray:
    """The ids that so many rows name, of which none does."""
    return np.zeros((rows, MAX_NAMED_IDS), np.int32)
