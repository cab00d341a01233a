"""Keeps upstream's batch of running requests in order while steps are in flight.

Reaches into upstream's batches.

What breaks: Upstream's batch does not know what steps in flight have done.
Why: They are not upstream's.
Remove when: With `program.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from enginepool.engine.steady.penalties import recount

if TYPE_CHECKING:
    from sgl_jax.srt.managers.schedule_batch import ScheduleBatch


def drop_ended(batch: ScheduleBatch) -> None:
    """Remove requests that have ended from upstream's batch, so that others find room in it."""
    before = batch.batch_size()
    batch.filter_batch()
    if batch.batch_size() < before:
        batch.reqs_info[0].batch_is_full = False


def write_back_batch(batch: ScheduleBatch) -> None:
    """Make upstream's batch agree with its requests, as after a step of its own."""
    info = batch.reqs_info[0]
    if info.reqs:
        lengths = [req.kv_committed_len for req in info.reqs]
        info.seq_lens = np.array(lengths, np.asarray(info.seq_lens).dtype)
        info.seq_lens_sum = sum(lengths)
        info.output_ids = np.array([req.output_ids[-1] for req in info.reqs], np.int32)
        recount(info)
