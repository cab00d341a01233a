"""The state of one server: its pool, front ends by port, running requests, metrics, history."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastapi import Request
from sgl_jax.srt.managers.template_manager import TemplateManager

from enginepool.dispatch.condition import EngineState
from enginepool.runtime import statistics
from enginepool.serve.admin_operations import AdminOperations
from enginepool.serve.error_replies import Refused
from enginepool.serve.exchange import Exchange
from enginepool.serve.history import History
from enginepool.serve.log import log_exchange
from enginepool.serve.metrics import GENERATING, Metrics
from enginepool.serve.open_exchanges import OpenExchanges
from enginepool.serve.options import ServeOptions
from enginepool.serve.prompt_limits import PromptLimits
from enginepool.serve.record import ExchangeRecord, outcome_of
from enginepool.serve.rendering import Rendering
from enginepool.serve.scoring import ScoreExchange
from enginepool.serve.served_models import ServedModels

if TYPE_CHECKING:
    from enginepool.pool.pool import EnginePool
    from enginepool.pool.tokenizer_manager import FrontEnd
    from enginepool.runtime.swap_report import SwapReport

_SHOWN_RECOVERIES = 5


class Service:
    """Used on the server's event loop only.

    Attributes:
        front: The front end of the whole pool.
        models: The names that requests can have as `model` or `lora_path`.
        exchanges: Requests that are being served.
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
        processor = self.runtime.input_processor
        tokenizer, limits = processor.tokenizer, processor.limits
        self.prompt_limits = PromptLimits(
            tokenizer, limits.longest, limits.origin, options.max_prompts
        )
        self._rendering = Rendering(tokenizer, self.prompt_limits)
        self.metrics = Metrics(self.runtime)
        self.admin = AdminOperations(pool, options.model_root, self._updated, self.runtime.desired)
        base = self.front.served_model_name or self.front.model_path
        self.models = ServedModels(pool, self.runtime, base, options)
        self.history = History(self.runtime)
        self.exchanges = OpenExchanges(options, self.admin, self._note)
        self._last_update: dict[str, Any] | None = None
        self.started = time.time()

    def engine_of(self, raw: Request) -> int | None:
        """The engine whose port the request came to; None if the port is the pool's."""
        return self._engine_ports.get(_port(raw))

    def front_of(self, raw: Request) -> FrontEnd:
        """The front end of the engine whose port the request came to, or else of the pool."""
        return self._by_port.get(_port(raw), self.front)

    def exchange(self, raw: Request) -> Exchange:
        return Exchange(*self._exchange_args(raw))

    def score_exchange(self, raw: Request) -> ScoreExchange:
        return ScoreExchange(*self._exchange_args(raw))

    def _exchange_args(self, raw: Request) -> Any:
        return (
            self.exchanges, self.front_of(raw), self._rendering, self.models, self.options, raw
        )  # fmt: skip

    def not_ready(self, raw: Request) -> str | None:
        """The reason why nothing can be served; None if something can."""
        if self.exchanges.draining:
            return "the server is shutting down"
        index = self.engine_of(raw)
        workers = self.runtime.workers if index is None else [self.runtime.workers[index]]
        states = [worker.condition.state for worker in workers]
        if {EngineState.SERVING, EngineState.DRAINING}.intersection(states):
            return None
        return f"no engine can serve: {', '.join(state.value for state in states)}"

    def refused(self, path: str, why: Refused) -> None:
        """Record a request that was refused before it became an exchange."""
        outcome = outcome_of(why.status, None)
        self._note(ExchangeRecord(path, why.status, outcome, error=str(why)))

    def _note(self, record: ExchangeRecord) -> None:
        self.metrics.ended(record)
        if record.path in GENERATING:
            self.history.ended(record)
        log_exchange(record, prompts=self.options.log_prompts)

    def _updated(self, report: SwapReport) -> None:
        self.metrics.updated(report)
        self._last_update = {
            "time": time.time(),
            "weight_version": report.weight_version,
            "seconds": report.seconds["total"],
        }

    def cut(self) -> None:
        """End all requests that are still running when the drain's time is over."""
        dispatch = self.runtime.dispatch
        limit = f"--drain-timeout {self.options.drain_timeout:g}"
        message = f"the server ended before this was finished ({limit})"
        self.exchanges.cut = message
        dispatch.abort(dispatch.unfinished(), message, "draining")

    def status(self) -> dict[str, Any]:
        counts = self.runtime.dispatch.counts
        return {
            "model": self.front.served_model_name,
            "model_path": self.admin.model_path,
            "time": time.time(),
            "uptime": time.time() - self.started,
            "draining": self.exchanges.draining,
            "reloading": self.admin.reloading,
            "weight_version": self.runtime.desired.weight_version,
            "waiting": self.runtime.dispatch.waiting,
            "finished": counts.finished,
            "aborted": counts.aborted,
            "prompt_tokens": counts.prompt_tokens,
            "completion_tokens": counts.completion_tokens,
            "engines": [statistics.engine(worker) for worker in self.runtime.workers],
            "last_update": self._last_update,
            "last_reload_error": self.admin.last_error,
            "recoveries": self._recoveries(),
            "history": self.history.samples(),
        }

    def _recoveries(self) -> list[dict[str, Any]]:
        """The latest, newest first."""
        return [
            {name: event[name] for name in ("time", "engine", "by")}
            for event in reversed(self.runtime.events.latest())
            if event["event"] == "engine_recovered"
        ][:_SHOWN_RECOVERIES]


def _port(raw: Request) -> int:
    """The port that a request came to."""
    return raw.scope["server"][1]
