"""Warm-up: compiles every program that serving needs, before the first request.

It runs upstream's own precompile, over the buckets that `max_running_requests` and
`max_prefill_tokens` allow, with batches in the form of the pool's requests.

Reaches into upstream's compilation manager: `_make_dummy_batch` is replaced during the warm-up, and
so are `_precompile_extend` and `_precompile_decode` if decode is steady.

What breaks: Without this the first request of every shape waits for compilations.
Why: Upstream's dummy batches have no seeds. A batch with seeds is another program, and every
request of a pool has a seed.
Remove when: The dummy batches can be given seeds. If the method is missing, an error names it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from enginepool.engine.executable_cache import compiling_ahead
from enginepool.engine.scheduler import PinnedScheduler
from enginepool.engine.start_stages import StartStages
from enginepool.process.host_state import no_progress_bars
from enginepool.process.upstream import expect

_REMEDY = 'open the pool with warmup="none"'


def warm_up(scheduler: PinnedScheduler, start: StartStages) -> None:
    """Compile the engine's programs, on its thread. Afterwards serving compiles nothing.

    Args:
        start: Counts the buckets that have begun.

    Raises:
        EnginePoolError: This upstream warms up in another way.
        Exception: Whatever upstream's forward raises on the dummy batches.
    """
    worker: Any = scheduler.tp_worker.worker
    expect(worker, "compilation_manager", "run_precompile", remedy=_REMEDY)
    manager = worker.compilation_manager
    expect(manager, "_make_dummy_batch", "token_buckets", "bs_buckets", remedy=_REMEDY)
    make_dummy_batch = manager._make_dummy_batch

    def seeded(*args: Any, **kwargs: Any) -> Any:
        batch = make_dummy_batch(*args, **kwargs)
        batch.sampling_info.sampling_seeds = np.zeros(batch.real_bs, dtype=np.int32)
        return batch

    def counted(*args: Any, **kwargs: Any) -> Any:
        start.next_bucket()
        return seeded(*args, **kwargs)

    def noted(job: Callable[[], None]) -> None:
        start.next_bucket()
        with start.listening():
            job()

    start.buckets = len(manager.token_buckets) + len(manager.bs_buckets)
    ahead = [partial(noted, job) for job in scheduler.steady.ahead()]
    manager._make_dummy_batch = counted
    steady_prefill = scheduler.steady.prefill is not None
    if steady_prefill:  # upstream's prefill programs are not used
        manager._precompile_extend = lambda *_, **__: None
    if scheduler.steady.supported:  # nor its decode programs
        manager._precompile_decode = lambda *_, **__: None
    scheduler.top_logprobs.warm(True)
    try:
        with no_progress_bars(), compiling_ahead(ahead):
            worker.run_precompile()
            manager._make_dummy_batch = seeded
            next_bucket = start.next_bucket if steady_prefill else lambda: None
            scheduler.prefill_program.compile(next_bucket)
            scheduler.kv_cache.compile()
            if scheduler.adapters is not None:
                scheduler.adapters.compile()
        scheduler.steady.compile()
    finally:
        scheduler.top_logprobs.warm(False)
        del manager._make_dummy_batch
        for name in ("_precompile_extend", "_precompile_decode"):
            vars(manager).pop(name, None)
