"""Updates upstream's batch of running requests while steps are in flight.

Reaches into upstream's batches.

What breaks: Upstream's batch does not know what steps in flight have done. If requests leave and
join one by one, it copies all its arrays each time.
Why: The steps in flight are not upstream's. Between two steps of its own, upstream's scheduler
reads only the requests of the batch, and none of its arrays.
Remove when: With `program.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from sgl_jax.srt.sampling.sampling_batch_info import SamplingBatchInfo

from enginepool.engine.steady.penalties import recount

if TYPE_CHECKING:
    from sgl_jax.srt.managers.schedule_batch import Req, ScheduleBatch


def drop_ended(batch: ScheduleBatch) -> None:
    """Remove requests that have ended from upstream's batch, so that others find room in it. Its
    arrays are not updated before `write_back_batch`."""
    info = batch.reqs_info[0]
    left = [req for req in info.reqs if not req.finished()]
    if len(left) < len(info.reqs):
        info.reqs, info.batch_is_full = left, False


def join(batch: ScheduleBatch, reqs: Sequence[Req]) -> None:
    """Add requests to upstream's batch, without their values in its arrays."""
    info = batch.reqs_info[0]
    info.reqs = [*info.reqs, *reqs]


def write_back_batch(batch: ScheduleBatch) -> None:
    """Make upstream's batch agree with its requests, as after a step of its own."""
    info: Any = batch.reqs_info[0]
    reqs = info.reqs
    if not reqs:
        return
    lengths = [req.kv_committed_len for req in reqs]
    info.req_pool_indices = np.array([req.req_pool_idx for req in reqs], np.int32)
    info.seq_lens, info.seq_lens_sum = np.array(lengths, np.int32), sum(lengths)
    info.output_ids = np.array([req.output_ids[-1] for req in reqs], np.int32)
    info.out_cache_loc = None
    batch.has_stream = any(req.stream for req in reqs)
    batch.has_grammar = any(req.grammar for req in reqs)
    sampling = SamplingBatchInfo.from_schedule_batch(info, batch.model_config.vocab_size, batch)
    info.sampling_info = sampling
    recount(info)
