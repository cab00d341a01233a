"""How a batch travels: packed on the host, taken apart inside the programs.

Each array that is sent costs the host some tens of microseconds, however short it is.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from enginepool.engine.steady.device_batch import (
    COLUMNS,
    FLOATS,
    INTS,
    LIMITS,
    ORIGIN,
    STATE,
    DeviceBatch,
    Features,
    RowTable,
    SentBatch,
)
from enginepool.engine.steady.penalties import Penalties
from enginepool.engine.steady.sample import sampling_columns

_FLAGS = len(Features._fields)


def pack(features: Features, table: RowTable, *others: np.ndarray) -> np.ndarray:
    """Pack the numbers of a batch into one new array."""
    flags = np.array(features, np.int32)
    return np.concatenate([flags, table.numbers.reshape(-1), *(one.reshape(-1) for one in others)])


def rows_of(numbers: jax.Array, pages: int) -> int:
    """How many rows a decode batch has, each with this many pages in the block table."""
    return (len(numbers) - _FLAGS) // (COLUMNS + pages)


def rest_of(numbers: jax.Array, rows: int) -> jax.Array:
    """The numbers that were packed after the table."""
    return numbers[_FLAGS + rows * COLUMNS :]


def _table(numbers: jax.Array, rows: int) -> jax.Array:
    return numbers[_FLAGS : _FLAGS + rows * COLUMNS].reshape(rows, COLUMNS)


def state_and_origin(numbers: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Inside a program: the columns `state` and `origin` of the table."""
    table = _table(numbers, rows)
    return table[:, STATE].T, table[:, ORIGIN]


def limits_of(numbers: jax.Array, rows: int) -> jax.Array:
    """Inside a program: the columns `limits` of the table."""
    return _table(numbers, rows)[:, LIMITS]


def adapters_of(numbers: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Inside a program: by row: its adapter's slot, and the scale."""
    table = _table(numbers, rows)
    scales = jax.lax.bitcast_convert_type(table[:, FLOATS], jnp.float32)[:, 5]
    return table[:, INTS][:, 3], scales


def unpack(mesh: AbstractMesh, sent: SentBatch, rows: int, block_table: Any) -> DeviceBatch:
    """Inside a program: the batch that was sent."""
    sent_flags: Any = sent.numbers[:_FLAGS] > 0
    flags: Any = Features(*sent_flags)
    table = _table(sent.numbers, rows)
    floats = jax.lax.bitcast_convert_type(table[:, FLOATS], jnp.float32)
    ints = table[:, INTS]
    return DeviceBatch(
        limits=table[:, LIMITS],
        penalties=Penalties(floats[:, 3:5], ints[:, 2]),
        block_table=block_table,
        sampling=sampling_columns(mesh, floats, ints),
        penalised=flags.penalised | flags.masked,
        top=flags.top,
        named=flags.named,
        kept=flags.kept,
        names=sent.names,
        mask=sent.mask,
        adapters=adapters_of(sent.numbers, rows),
    )
