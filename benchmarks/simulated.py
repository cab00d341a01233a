"""The simulated device: a micro model's step takes a fixed time, with the GIL released.

On a TPU the host waits while the device computes. On CPU the same cores do both, so a pool's
scaling cannot be seen with real steps. Here an engine waits for its result and then sleeps.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import jax

# An engine for it: four requests at a time, and a KV cache that costs the CPU little.
SERVER_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "context_length": 256,
    "max_total_tokens": 1024,
    "max_running_requests": 4,
    "max_prefill_tokens": 64,
    "chunked_prefill_size": 64,
    "precompile_token_paddings": [64],
    "precompile_bs_paddings": [4],
}


class SimulatedDevice:
    """What an engine's device was made to do: steps, and tokens that they advanced."""

    def __init__(self, engine: Any, step_seconds: float) -> None:
        """Slow a live engine down, from outside; it must be idle, and stays slow.

        Args:
            engine: Upstream's Engine, of a pool or not, without overlap scheduling.
            step_seconds: What a step costs on top of its own time. A step advances every request
                of its batch by one token. May be changed later, while the engine is idle.
        """
        self.step_seconds = step_seconds
        self.steps = self.tokens = 0
        scheduler = engine.scheduler_info["scheduler"]
        if hasattr(scheduler, "wait_for_device"):
            self._slow_down_pinned(scheduler)
        else:
            self._slow_down_upstream(scheduler.tp_worker)

    def _slow_down_pinned(self, scheduler: Any) -> None:
        """Where an engine of a pool waits for its device, it waits longer."""
        wait, limiter = scheduler.wait_for_device, scheduler.limiter

        @functools.wraps(wait)
        def slow(result: Any) -> None:
            with limiter.released():
                wait(result)
                self._sleep(scheduler.cur_batch.batch_size())

        scheduler.wait_for_device = slow

    def _slow_down_upstream(self, worker: Any) -> None:
        """Upstream waits within its worker, and after it."""
        forward = worker.forward_batch_generation

        @functools.wraps(forward)
        def slow(batch: Any, *args: Any, **kwargs: Any) -> Any:
            result = jax.block_until_ready(forward(batch, *args, **kwargs))
            self._sleep(batch.real_bs)
            return result

        worker.forward_batch_generation = slow

    def _sleep(self, requests: int) -> None:
        time.sleep(self.step_seconds)
        self.steps += 1
        self.tokens += requests

    def reset(self) -> None:
        self.steps = self.tokens = 0

    @property
    def tokens_per_simulated_second(self) -> float:
        """At most the requests of a batch over the step time, or the sleep was skipped; 0 without a
        sleep."""
        slept = self.steps * self.step_seconds
        return self.tokens / slept if slept else 0.0
