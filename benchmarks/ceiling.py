"""The device alone: an engine's decode program, dispatched back to back, with nothing in between.

What is left to 100 % belongs to the simulator and the machine, not to whoever prepares the steps.
"""

from __future__ import annotations

from typing import Any

import jax

# More are not dispatched ahead: each holds a queue's place, and none makes the device busier.
_AHEAD = 4


def back_to_back(scheduler: Any, steps: int) -> None:
    """Run the largest batch's program so often, on an idle engine's thread; KV cache is spoilt."""
    from sgl_jax.srt.layers.logits_processor import LogitsMetadata
    from sgl_jax.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    worker = scheduler.tp_worker.worker
    runner, manager = worker.model_runner, worker.compilation_manager
    size, places = manager.bs_buckets[-1], manager.cache_loc_buckets[-1]
    batch = manager._make_dummy_batch(
        size, size, ForwardMode.DECODE, places, dp_size=1, per_dp_bs_size=size
    )
    forward_batch = ForwardBatch.init_new(batch, runner)
    runner.attn_backend.forward_metadata = runner.attn_backend.get_forward_metadata(batch)
    metadata = LogitsMetadata.from_model_worker_batch(batch, runner.mesh)
    results: list[Any] = []
    for _ in range(steps):
        output, *_ = runner.forward(forward_batch, logits_metadata=metadata)
        results.append(output.next_token_logits)
        if len(results) > _AHEAD:
            results.pop(0).block_until_ready()
    jax.block_until_ready(results)
