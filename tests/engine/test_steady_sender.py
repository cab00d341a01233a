"""An array that was sent to a device stays as it was sent."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from enginepool.engine.steady.device_batch import Features, RowTable
from enginepool.engine.steady.sender import BatchSender, no_names

ROWS, VOCABULARY = 4, 272


def aligned(array: np.ndarray) -> np.ndarray:
    """The same array at an address where JAX reads it in place on CPU."""
    memory = np.zeros(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    there = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    there[...] = array
    return there


def test_a_batch_may_change_after_it_was_sent() -> None:
    """The host ends rows and allocates pages while steps that read the batch are in flight."""
    mesh = Mesh(
        np.array(jax.devices()[:1]).reshape(1, 1),
        ("data", "tensor"),
        axis_types=(AxisType.Explicit,) * 2,
    )
    config = SimpleNamespace(vocab_size=VOCABULARY)
    sender = BatchSender(SimpleNamespace(mesh=mesh, model_config=config), [ROWS])
    table = RowTable(ROWS)
    table.numbers[...] = 7
    block_table = aligned(np.full((ROWS, 16), 3, np.int32))
    names = aligned(no_names(ROWS))

    batch: Any = sender.batch(table, block_table, names, Features(named=True))
    before = [np.array(leaf) for leaf in jax.tree.leaves(batch)]
    for array in (table.numbers, block_table, names):
        array[...] = 99
    for leaf, value in zip(jax.tree.leaves(batch), before, strict=True):
        assert np.array_equal(leaf, value)
