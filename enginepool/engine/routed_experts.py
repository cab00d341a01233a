"""Records the experts that each token of an engine was routed to.

Reaches into upstream's model runner, scheduler and prefix cache: their methods are wrapped.

What breaks: Upstream has one capturer of experts per process, so several engines write into one
buffer. A thread fills the buffer. The scheduler polls until the buffer has a finished request's
last step, and no other request runs meanwhile. Steady decode does not call the capturer.
Why: Upstream expects one engine per process.
Remove when: A step returns the experts of its batch with its tokens.

The host keeps the experts of every KV slot. So a request whose prefix was found in the prefix cache
has them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from enginepool.dispatch.routed_experts import RoutedTokens, Routing
from enginepool.engine.running import RunningRequests
from enginepool.errors import InvalidConfig
from enginepool.process.upstream import expect

if TYPE_CHECKING:
    from sgl_jax.srt.configs.model_config import ModelConfig
    from sgl_jax.srt.managers.schedule_batch import Req, ScheduleBatch
    from sgl_jax.srt.managers.scheduler import Scheduler

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def stacked(layers: Sequence[jax.Array | None], dtype: np.dtype) -> jax.Array:
    """Inside a program: the experts that a model returns, by token, by layer with experts."""
    everywhere = PartitionSpec(None, None)
    found = [jax.sharding.reshard(layer, everywhere) for layer in layers if layer is not None]
    return jnp.stack(found, axis=1).astype(dtype)


def expert_dtype(model_config: ModelConfig) -> np.dtype:
    """The smallest type for the experts' numbers.

    Raises:
        InvalidConfig: The model has no experts.
    """
    configs = [getattr(model_config, name, None) for name in ("hf_text_config", "hf_config")]
    counts = [getattr(config, name, None) for config in configs for name in _EXPERTS]
    count = next((count for count in counts if count), None)
    if count is None:
        raise InvalidConfig(
            "enable_return_routed_experts=True: this model has no experts; leave it out"
        )
    return np.dtype(np.uint8 if count <= 256 else np.uint16)


def routing_of(layers: Sequence[Any], dtype: np.dtype, hf_config: Any) -> Routing:
    """How a model routes, by the shapes of what its forward returns.

    Args:
        layers: For each layer, the shape of the experts that the model's forward returns, or None.

    Raises:
        InvalidConfig: The forward returns no experts.
    """
    shapes = [layer.shape for layer in layers if layer is not None]
    if not shapes:
        backend = getattr(hf_config, "moe_backend", "")
        raise InvalidConfig(
            f"enable_return_routed_experts=True: with moe_backend={backend!r} this model does not "
            "say which experts it chose; use moe_backend='epmoe'"
        )
    return Routing([layer is not None for layer in layers], shapes[0][-1], dtype)


class RoutedExperts:
    """The experts of one engine's KV cache, and those of its requests. Used on its thread."""

    def __init__(self, scheduler: Scheduler, routing: Routing, running: RunningRequests) -> None:
        self.routing = routing
        self._scheduler, self._running = scheduler, running
        slots = scheduler.max_total_num_tokens + scheduler.page_size
        # The operating system allocates memory only for entries that are written.
        self._by_slot = np.zeros((slots, *routing.shape), routing.dtype)
        self._latest: jax.Array | Sequence[jax.Array | None] | None = None
        self._wrap(scheduler.tp_worker.worker.model_runner, scheduler.tree_cache)

    def _wrap(self, runner: Any, tree_cache: Any) -> None:
        expect(runner, "forward")
        expect(tree_cache, "cache_finished_req")
        forward, finished = runner.forward, tree_cache.cache_finished_req

        def forward_noting_experts(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            self._latest = result[2]
            return result

        def finished_noting_experts(req: Req, *args: Any, **kwargs: Any) -> Any:
            self._store(req)
            return finished(req, *args, **kwargs)

        runner.forward = forward_noting_experts
        tree_cache.cache_finished_req = finished_noting_experts

    def tokens_of(self, req: Req) -> RoutedTokens | None:
        """The experts of the pool's request, if it is still here."""
        if (request := self._running.held.get(req.rid)) is None:
            return None
        if request.experts is None:
            request.experts = RoutedTokens(self.routing)
        return request.experts

    def computed(self, experts: jax.Array | None) -> None:
        """Record the experts of a step that another program has run. `collect` takes them."""
        self._latest = experts

    def collect(self, batch: ScheduleBatch) -> None:
        """Take the experts of one of upstream's steps, before its tokens are processed."""
        latest, self._latest = self._latest, None
        if latest is None:
            return
        info = batch.reqs_info[0]
        rows = self._fetched(latest)
        if batch.forward_mode.is_extend():
            starts, counts = info.prefix_lens or [], info.extend_lens or []
        else:
            starts, counts = [length - 1 for length in info.seq_lens], [1] * len(info.reqs)
        place = 0
        for req, start, count in zip(info.reqs, starts, counts, strict=True):
            self._take(req, int(start), rows[place : place + count])
            place += count

    def _fetched(self, latest: jax.Array | Sequence[jax.Array | None]) -> np.ndarray:
        """The experts on the host. Upstream's own decode steps return a list by layer."""
        if isinstance(latest, list | tuple):
            found = jax.device_get([layer for layer in latest if layer is not None])
            return np.stack(found, axis=1).astype(self.routing.dtype)
        return np.asarray(latest)

    def _take(self, req: Req, start: int, rows: np.ndarray) -> None:
        slots = self._slots(req, 0, start + len(rows))
        self._by_slot[slots[start:]] = rows
        if (tokens := self.tokens_of(req)) is None:
            return
        if tokens.count < start:  # they were in the prefix cache
            tokens.extend(tokens.count, self._by_slot[slots[tokens.count : start]])
        tokens.extend(start, rows)
        tokens.stored = start + len(rows)

    def _store(self, req: Req) -> None:
        """Store the experts that steady decode has added. Other requests may find the KV cache of
        these tokens."""
        tokens = None if req.req_pool_idx is None else self.tokens_of(req)
        if tokens is not None and (end := min(req.kv_committed_len, tokens.count)) > tokens.stored:
            slots = self._slots(req, tokens.stored, end)
            self._by_slot[slots] = tokens.rows(tokens.stored, end)

    def _slots(self, req: Req, start: int, end: int) -> np.ndarray:
        pool: Any = self._scheduler.req_to_token_pool
        return pool.req_to_token[req.req_pool_idx, start:end]
