"""Metrics for Prometheus, in a registry of this server's own.

Names follow vLLM's and sglang's with the prefix `enginepool:`. Counters and histograms are fed
by requests that came through the server; gauges look at the pool when they are scraped.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from enginepool.engine.states import EngineState
from enginepool.swap.report import SwapReport

if TYPE_CHECKING:
    from enginepool.runtime.runtime import Runtime
    from enginepool.serve.handler import Exchange

_GENERATING = ("/generate", "/v1/completions", "/v1/chat/completions")
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


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
            "time_to_first_token_seconds", "From submission on", _LONG, by_engine
        )
        self._each = self._histogram(
            "time_per_output_token_seconds", "After the first", _SHORT, by_engine
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From submission to the end of an output", _LONG,
            by_engine,
        )  # fmt: skip
        self._swap = self._histogram(
            "weight_update_seconds", "Updates of weights by phase", _LONG, ("phase",)
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def ended(self, exchange: Exchange, outcome: str) -> None:
        """Count a reply and its outputs. One that still runs is about to be cancelled."""
        self._replies.labels(exchange.path, outcome).inc()
        now = time.perf_counter()
        for request in exchange.call.requests if exchange.call is not None else []:
            engine = "none" if request.engine_index is None else str(request.engine_index)
            reason = request.finish_reason or {"type": "abort"}
            self._outputs.labels(engine, reason["type"]).inc()
            self._prompt.labels(engine).inc(len(request.input_ids))
            self._generated.labels(engine).inc(len(request.output_ids))
            if request.cached_tokens is not None:
                self._queries.labels(engine).inc(len(request.input_ids))
                self._hits.labels(engine).inc(request.cached_tokens)
            end = request.finished_at or now
            self._whole.labels(engine).observe(end - request.created)
            first, count = request.first_token_at, len(request.output_ids)
            if first:
                self._first.labels(engine).observe(first - request.created)
            if first and count > 1:
                self._each.labels(engine).observe(max(0.0, end - first) / (count - 1))

    def refused(self, path: str) -> None:
        """Count a request that was no exchange yet, if it was to be one."""
        if path in _GENERATING:
            self._replies.labels(path, "refused").inc()

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
    """What the pool is doing at the moment of a scrape."""

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
        """Events are the latest thousand: what is new since the last look is added up."""
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
