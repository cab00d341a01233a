"""How an engine's thread waits for its device.

Reaches into upstream's model runner: its `compute_logprobs` is replaced.

What breaks: Upstream reads a step's result as soon as it has launched the step. While it waits, the
device has nothing to do next, and no other engine can use the host.
Why: One call, `run_batch`, launches and reads.
Remove when: Upstream has one call that launches a step and another that reads its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from enginepool.engine.gil_limiter import Limiter


class DeviceWait:
    """The waits of one engine. Used on the engine's thread."""

    def __init__(self, model_runner: Any, limiter: Limiter) -> None:
        self._limiter = limiter
        self._compute_logprobs = model_runner.compute_logprobs
        self._launch: Callable[[], object] | None = None
        model_runner.compute_logprobs = self._compute_logprobs_and_wait

    def until_ready(self, result: jax.Array) -> None:
        """Wait until the device has computed a result. Other engines may use the host meanwhile."""
        with self._limiter.released():
            result.block_until_ready()

    @contextmanager
    def launching_before(self, launch: Callable[[], object]) -> Iterator[None]:
        """Run a step of upstream's in the block. `launch` is called between its launch and the wait
        for its result."""
        self._launch = launch
        try:
            yield
        finally:
            self._launch = None

    def _compute_logprobs_and_wait(self, *args: Any) -> Any:
        """The last program of a step of upstream's, which would read the result right after it."""
        logprobs = self._compute_logprobs(*args)
        if self._launch is not None:
            self._launch()
        self.until_ready(logprobs)
        return logprobs
