"""What one server knows: the pool, its front ends by port, who is being served, how it went."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

from anyio import CapacityLimiter
from fastapi import Request
from sgl_jax.srt.managers.template_manager import TemplateManager

from enginepool.engine.states import EngineState
from enginepool.logs import logger
from enginepool.runtime import statistics
from enginepool.serve.administration import Desk
from enginepool.serve.bounds import Bounds
from enginepool.serve.error_replies import Refused
from enginepool.serve.handler import Exchange, outcome_of
from enginepool.serve.history import History
from enginepool.serve.metrics import Metrics
from enginepool.serve.options import ServeOptions
from enginepool.serve.rendering import Rendering

if TYPE_CHECKING:
    from enginepool.pool.pool import EnginePool
    from enginepool.pool.tokenizer_manager import FrontEnd

_RENDERERS = 4


class Service:
    """Lives on the server's event loop.

    Attributes:
        front: Of the whole pool.
        exchanges: Requests that are being served.
        draining: No new requests; those that run finish.
        renderers: How many chat templates run at once, so that threads are left for the rest.
    """

    def __init__(
        self, pool: EnginePool, options: ServeOptions, engine_ports: dict[int, int]
    ) -> None:
        self.pool = pool
        self.options = options
        self.front = pool.front_end()
        self._by_port = {port: pool.front_end(index) for port, index in engine_ports.items()}
        self._engine_ports = engine_ports
        self.runtime = self.front.runtime
        self.templates = TemplateManager()
        self.templates.initialize_templates(self.front.model_path)
        tokenizer, limits = self.runtime.intake.tokenizer, self.runtime.intake.limits
        self.bounds = Bounds(tokenizer, limits.prompt, limits.origin)
        self.rendering = Rendering(tokenizer, self.bounds)
        self.renderers = CapacityLimiter(_RENDERERS)
        self.desk = Desk(pool, options.model_root)
        self.metrics = Metrics(self.runtime)
        self.desk.on_update = self.metrics.updated
        self.history = History(self.runtime)
        self.exchanges: set[Exchange] = set()
        self.draining = False
        self.started = time.time()
        self.token_text = functools.lru_cache(1 << 16)(tokenizer.token_text)

    def front_of(self, raw: Request) -> FrontEnd:
        """Of the pool, or of the engine whose port the request came to."""
        return self._by_port.get(_port(raw), self.front)

    def exchange(self, raw: Request) -> Exchange:
        return Exchange(self, self.front_of(raw), raw)

    def check_open(self) -> None:
        """Raise if new requests are not taken now."""
        if self.draining:
            raise Refused(
                503, "the server is about to end and takes no new requests", code="draining",
                retry_after=10,
            )  # fmt: skip
        if self.options.reject_while_reloading and self.desk.reloading:
            raise Refused(503, "new weights are being loaded", code="reloading", retry_after=1)

    def not_ready(self, raw: Request) -> str | None:
        """Why nothing can be served, if so."""
        if self.draining:
            return "the server is about to end"
        index = self._engine_ports.get(_port(raw))
        workers = self.runtime.workers if index is None else [self.runtime.workers[index]]
        states = [worker.condition.state for worker in workers]
        if {EngineState.SERVING, EngineState.DRAINING}.intersection(states):
            return None
        return f"no engine can serve: {', '.join(state.value for state in states)}"

    def ended(self, exchange: Exchange, status: int) -> None:
        """Count a request and write its line."""
        outcome = outcome_of(exchange, status)
        self.metrics.ended(exchange, outcome)
        requests = exchange.call.requests if exchange.call is not None else []
        seconds = time.perf_counter() - exchange.started
        about: dict[str, Any] = {
            "path": exchange.path,
            "status": status,
            "outcome": outcome,
            "seconds": round(seconds, 4),
        }
        if requests:
            about |= {
                "ids": list(dict.fromkeys(request.id or request.rid for request in requests)),
                "engines": sorted({r.engine_index for r in requests if r.engine_index is not None}),
                "prompt_tokens": sum(len(r.input_ids) for r in requests if r.sample_index == 0),
                "completion_tokens": sum(len(request.output_ids) for request in requests),
            }
        if exchange.first_output_at is not None:
            about["first_output_seconds"] = round(exchange.first_output_at - exchange.started, 4)
        if exchange.failure is not None:
            about["error"] = str(exchange.failure)[:500]
        if self.options.log_prompts:
            about["prompts"] = [r.text or r.input_ids for r in requests if r.sample_index == 0]
        logger().info("enginepool.request", **about)

    def refused(self, path: str, why: Refused) -> None:
        """Count a request that was answered before it was an exchange, and write its line."""
        self.metrics.refused(path)
        logger().info(
            "enginepool.request", path=path, status=why.status, outcome="refused", error=str(why)
        )

    def status(self) -> dict[str, Any]:
        counts = self.runtime.dispatch.counts
        return {
            "model": self.front.served_model_name,
            "uptime": time.time() - self.started,
            "draining": self.draining,
            "reloading": self.desk.reloading,
            "weight_version": self.runtime.desired.weight_version,
            "waiting": self.runtime.dispatch.waiting,
            "finished": counts.finished,
            "aborted": counts.aborted,
            "prompt_tokens": counts.prompt_tokens,
            "completion_tokens": counts.completion_tokens,
            "engines": [statistics.engine(worker) for worker in self.runtime.workers],
            "history": self.history.samples(),
        }


def _port(raw: Request) -> int:
    """The port that a request came to."""
    return raw.scope["server"][1]
