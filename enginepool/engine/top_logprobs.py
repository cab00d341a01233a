"""The most probable tokens of each step, for requests that ask for them.

Reaches into upstream's model runner: its `compute_logprobs` is replaced.

What breaks: Upstream's own way compiles a program for every arrangement of widths in a batch, while
it serves, and its results are misaligned where only some requests ask.
Why: The widths of a batch's requests are part of the program's shape.
Remove when: Upstream computes one width for all. Another signature is refused, by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from enginepool.process.upstream import expect_parameters
from enginepool.requests.request import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from enginepool.requests.request import Request


# Below every log-probability of what may be sampled.
_NEVER = -1e30


class TopLogprobs:
    """The most probable tokens of a step, in one program of fixed width for every batch."""

    def __init__(self, model_runner: Any) -> None:
        expect_parameters(model_runner.compute_logprobs, "logits", "token_ids")
        self._original = model_runner.compute_logprobs
        width = min(MAX_TOP_LOGPROBS, model_runner.model_config.vocab_size)
        self._latest: tuple[jax.Array, jax.Array] | None = None
        self.wanted = False
        replicated = NamedSharding(model_runner.mesh, PartitionSpec(None, None))

        # Without `self`: in a cycle the last step's arrays would outlive a closed engine.
        @jax.jit
        def top(logprobs: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jax.lax.top_k(jax.sharding.reshard(logprobs, replicated), width)

        self._top = top
        model_runner.compute_logprobs = self._compute

    def _compute(self, token_logprobs: jax.Array, token_ids: jax.Array) -> Any:
        self._latest = self._top(token_logprobs) if self.wanted else None
        return self._original(token_logprobs, token_ids)

    def collect(self, batch: Any, held: dict[str, Request]) -> None:
        """Append this step's row to each request that asked; rows are in the batch's order."""
        latest, self._latest = self._latest, None
        self.wanted = any(request.top_logprobs_num for request in held.values())
        if latest is None or batch is None:
            return
        values, ids = (np.asarray(array) for array in jax.device_get(latest))
        reqs = [req for info in batch.reqs_info for req in info.reqs or ()]
        for row, req in enumerate(reqs):
            request = held.get(req.rid)
            if request is None or not request.top_logprobs_num:
                continue
            if len(request.top_logprobs) < len(req.output_ids):
                k = request.top_logprobs_num
                # Fewer where a grammar allows fewer: the others have float32's lowest.
                k = min(k, int((values[row] > _NEVER).sum()))
                request.top_logprobs.append((values[row, :k].tolist(), ids[row, :k].tolist()))
