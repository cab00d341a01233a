"""Metrics for Prometheus, in a registry of this server's own.

Names follow vLLM's and sglang's with the prefix `enginepool:`. Counters and histograms are fed
by requests and updates that came through the server. Gauges, and the counter of recoveries, look at
the pool when they are scraped.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from enginepool.dispatch.condition import EngineState
from enginepool.runtime.swap_report import SwapReport
from enginepool.serve.record import ExchangeRecord, OutputRecord

if TYPE_CHECKING:
    from enginepool.runtime.runtime import Runtime

GENERATING = (
    *("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses"),
    *("/v1/score", "/inference/v1/generate"),
)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_LENGTHS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_WAITS = tuple(sorted({*_SHORT, *_LONG}))


class Metrics:
    content_type = CONTENT_TYPE_LATEST

    def __init__(self, runtime: Runtime) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Pool(runtime))
        by_engine = ("engine",)
        self._replies = self._counter("http_requests", "Requests by outcome", ("path", "outcome"))
        self._outputs = self._counter(
            "request_success", "Outputs by engine and finish reason", ("engine", "finished_reason")
        )
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts", by_engine)
        self._generated = self._counter("generation_tokens", "Tokens generated", by_engine)
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up", by_engine)
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found cached", by_engine)
        self._first = self._histogram(
            "time_to_first_token_seconds", "From submission to the first token", _LONG, by_engine
        )
        self._each = self._histogram(
            "time_per_output_token_seconds", "Per token after the first", _SHORT, by_engine
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From submission to the end of an output", _LONG,
            by_engine,
        )  # fmt: skip
        self._queued = self._histogram(
            "request_queue_time_seconds",
            "From submission until an engine took the request",
            _WAITS,
            by_engine,
        )
        self._prompts = self._histogram(
            "request_prompt_tokens", "Tokens of the prompt of an output", _LENGTHS, by_engine
        )
        self._lengths = self._histogram(
            "request_generation_tokens", "Tokens of an output", _LENGTHS, by_engine
        )
        Info("enginepool:build", "What serves", registry=self._registry).info(
            {"version": version("enginepool"), "sglang_jax": version("sglang-jax"),
             "jax": version("jax")}
        )  # fmt: skip
        self._swap = self._histogram(
            "weight_update_seconds", "Updates of weights by phase", _LONG, ("phase",)
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def ended(self, record: ExchangeRecord) -> None:
        """Count a request to a route that generates, and its outputs."""
        if record.path in GENERATING:
            self._replies.labels(record.path, record.outcome).inc()
        for output in record.outputs:
            self._count(output)

    def _count(self, output: OutputRecord) -> None:
        engine = "none" if output.engine_index is None else str(output.engine_index)
        self._outputs.labels(engine, output.finish_reason).inc()
        self._prompt.labels(engine).inc(output.prompt_tokens)
        self._generated.labels(engine).inc(output.completion_tokens)
        if output.cached_tokens is not None:
            self._queries.labels(engine).inc(output.prompt_tokens)
            self._hits.labels(engine).inc(output.cached_tokens)
        self._whole.labels(engine).observe(output.seconds)
        self._lengths.labels(engine).observe(output.completion_tokens)
        if output.prompt_tokens:
            self._prompts.labels(engine).observe(output.prompt_tokens)
        if output.queue_seconds is not None:
            self._queued.labels(engine).observe(output.queue_seconds)
        first, count = output.first_token_seconds, output.completion_tokens
        if first is not None:
            self._first.labels(engine).observe(first)
            if count > 1:
                self._each.labels(engine).observe(max(0.0, output.seconds - first) / (count - 1))

    def updated(self, report: SwapReport) -> None:
        """Count an update of weights."""
        for phase, seconds in report.seconds.items():
            self._swap.labels(phase).observe(seconds)

    def _counter(self, name: str, about: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"enginepool:{name}", about, labels, registry=self._registry)

    def _histogram(
        self, name: str, about: str, buckets: tuple[float, ...], labels: tuple[str, ...]
    ) -> Histogram:
        return Histogram(
            f"enginepool:{name}", about, labels, buckets=buckets, registry=self._registry
        )


class _Pool(Collector):
    """Gauges of the pool and its recoveries, read at each scrape."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._recoveries: Tally[tuple[str, str]] = Tally()
        self._seen = 0.0

    def collect(self) -> Iterator[Any]:
        runtime = self._runtime
        running = _gauge("num_requests_running", "Requests that an engine holds", "engine")
        used = _gauge("kv_cache_usage_perc", "KV cache in use, 1 is all of it", "engine")
        states = _gauge("engine_state", "1 for the state that an engine is in", "engine", "state")
        for worker in runtime.workers:
            engine = str(worker.index)
            running.add_metric([engine], worker.channel.load())
            tokens, capacity = worker.channel.kv_usage()
            used.add_metric([engine], tokens / capacity if capacity else 0.0)
            for state in EngineState:
                states.add_metric([engine, state.value], float(worker.condition.state is state))
        waiting = _gauge("num_requests_waiting", "Requests that no engine holds yet")
        waiting.add_metric([], runtime.dispatch.waiting)
        version = _gauge("weight_version", "1, with the version of the weights", "version")
        version.add_metric([str(runtime.desired.weight_version)], 1)
        yield from (running, waiting, used, states, version, self._recovered())

    def _recovered(self) -> CounterMetricFamily:
        """Only the latest thousand events are kept, so new recoveries are added up at each look."""
        for event in self._runtime.events.latest():
            if event["event"] == "engine_recovered" and event["time"] > self._seen:
                self._recoveries[str(event["engine"]), event["by"]] += 1
                self._seen = event["time"]
        family = CounterMetricFamily(
            "enginepool:engine_recoveries", "Resets and rebuilds", labels=("engine", "by")
        )
        for worker in self._runtime.workers:
            for by in ("reset", "rebuild"):
                engine = str(worker.index)
                family.add_metric([engine, by], self._recoveries[engine, by])
        return family


def _gauge(name: str, about: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"enginepool:{name}", about, labels=labels)
