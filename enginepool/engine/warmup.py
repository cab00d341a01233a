"""Warm-up: every program that serving needs is compiled before the first request.

Upstream's own precompile over the buckets that `max_running_requests` and `max_prefill_tokens`
allow, in the form that the pool's requests have. Touches upstream's private attributes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from enginepool.engine.scheduler import PinnedScheduler
from enginepool.process.guest import no_progress_bars


def warm_up(scheduler: PinnedScheduler) -> None:
    """Compile the engine's programs, on its thread. Afterwards serving compiles nothing.

    Raises:
        Exception: Whatever upstream's forward raises on the dummy batches.
    """
    worker = scheduler.tp_worker.worker
    manager = worker.compilation_manager
    make_dummy_batch = manager._make_dummy_batch

    def seeded(*args: Any, **kwargs: Any) -> Any:
        """Every request of a pool has a seed, so the programs take seeds."""
        batch = make_dummy_batch(*args, **kwargs)
        batch.sampling_info.sampling_seeds = np.zeros(batch.real_bs, dtype=np.int32)
        return batch

    manager._make_dummy_batch = seeded
    scheduler.want_top_logprobs(True)
    try:
        with no_progress_bars():
            worker.run_precompile()
        scheduler.kv_cache.compile()
    finally:
        scheduler.want_top_logprobs(False)
        del manager._make_dummy_batch
