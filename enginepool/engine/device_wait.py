"""How an engine's thread waits for its device.

Reaches into upstream's model runner: its `compute_logprobs` is replaced.

What breaks: Upstream reads a step's result as soon as it has launched the step. While it waits, no
other engine can use the host.
Why: One call, `run_batch`, launches and reads.
Remove when: Upstream has one call that launches a step and another that reads its result.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import jax

from enginepool.engine.gil_limiter import Limiter


class DeviceWait:
    """The waits of one engine. Used on the engine's thread."""

    def __init__(self, model_runner: Any, limiter: Limiter) -> None:
        self._limiter = limiter
        self._compute_logprobs = model_runner.compute_logprobs
        model_runner.compute_logprobs = self._compute_logprobs_and_wait

    def until_ready(self, result: jax.Array) -> None:
        """Wait until the device has computed a result. Other engines may use the host meanwhile."""
        array: Any = result  # JAX's types do not have `is_ready`
        with nullcontext() if array.is_ready() else self._limiter.released():
            result.block_until_ready()

    def _compute_logprobs_and_wait(self, *args: Any) -> Any:
        """Run the last program of an upstream step, whose result upstream reads next."""
        logprobs = self._compute_logprobs(*args)
        self.until_ready(logprobs)
        return logprobs
