"""sglang's own endpoints, the limits of a request, metrics, the page."""

import json
from contextlib import ExitStack
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from enginepool import EnginePool
from tests.support.liveness import callers, paused, until, waiting
from tests.support.pools import SMALL
from tests.support.servers import Running, generate, serving

SUM = "12+7="


def test_generate(plain: Running, sums: EnginePool) -> None:
    """Upstream's reply: a dict for one prompt, a list for several prompts or samples."""
    with plain.http() as client:
        one = generate(client, SUM)
        assert one["text"] == "19"
        assert one["meta_info"]["finish_reason"] == {"type": "stop", "matched": 258}
        assert one["output_ids"] == sums.generate(SUM, {"temperature": 0})["output_ids"]
        many = client.post(
            "/generate",
            json={"text": [SUM, "30+4="], "sampling_params": {"temperature": 0, "n": 2}},
        ).json()
        assert [result["text"] for result in many] == ["19", "19", "34", "34"]
        ids = client.post(
            "/generate",
            json={
                "input_ids": list(SUM.encode()),
                "rid": "mine",
                "return_logprob": True,
                "sampling_params": {"temperature": 0},
            },
        ).json()
        assert ids["text"] == "19"
        assert ids["meta_info"]["id"] == "mine"
        assert [entry[2] for entry in ids["meta_info"]["output_token_logprobs"]] == [
            "1", "9", "<|im_end|>",
        ]  # fmt: skip


def test_generate_streams(plain: Running) -> None:
    """Cumulative chunks, as upstream's, then [DONE]."""
    body = {"text": SUM, "stream": True, "sampling_params": {"temperature": 0}}
    with plain.http() as client, client.stream("POST", "/generate", json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        *chunks, done = [line[6:] for line in reply.iter_lines() if line]
    assert done == "[DONE]"
    texts = [json.loads(chunk)["text"] for chunk in chunks]
    assert texts[-1] == "19"
    assert all(later.startswith(text) for text, later in pairwise(texts))


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({}, "no prompt"),
        ({"text": []}, "no prompt"),
        ({"text": SUM, "input_ids": [1]}, "not both"),
        ({"text": SUM, "sampling_params": {"temprature": 1}}, "did you mean temperature"),
        ({"text": SUM, "sampling_params": "x"}, "expected a dict, or a list"),
        ({"text": SUM, "sampling_params": {"n": 129}}, "n=129"),
        ({"text": [SUM, SUM], "rid": ["a"]}, "1 ids for 2 prompts"),
        ({"text": SUM, "lora_path": "x"}, "lora_path"),
        ({"text": SUM, "stream": "perhaps"}, "stream=<str of 7 characters>"),
        ({"text": "\ud800"}, "surrogate"),
        ({"text": SUM, "rid": "\udfff"}, "surrogate"),
    ],
)
def test_bad_bodies(plain: Running, body: dict[str, Any], part: str) -> None:
    with plain.http() as client:
        reply = client.post(
            "/generate",
            content=json.dumps(body),
            headers={"Content-Type": "application/json"},
        )
    assert reply.status_code == 400
    assert part in reply.json()["error"]["message"]


@pytest.mark.parametrize("announced", [True, False])
def test_large_bodies(sums: EnginePool, announced: bool) -> None:
    """413 with the limit, whether the length was announced or not."""
    content = json.dumps({"text": "1" * 2000}).encode()
    with serving(sums, max_body_bytes=1000) as running, running.http() as client:
        reply = client.post(
            "/generate",
            content=content if announced else iter([content[:900], content[900:]]),
            headers={"Content-Type": "application/json"},
        )
        assert reply.status_code == 413
        assert "at most 1000" in reply.json()["error"]["message"]
        assert generate(client, SUM)["text"] == "19"


def samples(client: httpx.Client) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        (
            sample.name.removeprefix("enginepool:"),
            *(v for _, v in sorted(sample.labels.items())),
        ): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics(one_sum: EnginePool) -> None:
    """Counts are exact, by engine and outcome. Gauges have the present values."""
    with serving(one_sum, enable_admin=True) as running, running.http() as client:
        one_sum.flush_cache()
        for _ in range(2):
            generate(client, SUM)
        client.post("/v1/completions", json={"model": "toy", "prompt": SUM, "max_tokens": -1})
        body = {"text": SUM, "stream": True, "sampling_params": {"temperature": 0}}
        client.post("/generate", json=body)
        client.post("/v1/completions", json={"model": "toy", "prompt": SUM, "n": 0})
        seen = samples(client)
        assert seen["http_requests_total", "ok", "/generate"] == 3
        assert seen["http_requests_total", "refused", "/v1/completions"] == 2
        assert seen["request_success_total", "0", "stop"] == 3
        assert seen["prompt_tokens_total", "0"] == 15
        assert seen["generation_tokens_total", "0"] == 9
        assert seen["prefix_cache_hits_total", "0"] == 8  # the last token is always computed
        assert seen["prefix_cache_queries_total", "0"] == 15
        assert seen["time_to_first_token_seconds_count", "0"] == 3
        assert seen["time_per_output_token_seconds_count", "0"] == 3
        assert seen["e2e_request_latency_seconds_count", "0"] == 3
        first, each, whole, queue = (
            seen[f"{name}_seconds_sum", "0"]
            for name in (
                *("time_to_first_token", "time_per_output_token", "e2e_request_latency"),
                "request_queue_time",
            )
        )
        assert 0 < queue < first
        assert seen["request_queue_time_seconds_count", "0"] == 3
        for name, tokens in (("prompt", 5), ("generation", 3)):
            assert seen[f"request_{name}_tokens_count", "0"] == 3
            assert seen[f"request_{name}_tokens_sum", "0"] == 3 * tokens
            assert seen[f"request_{name}_tokens_bucket", "0", "5.0"] == 3
        built = {name: version(name) for name in ("jax", "sglang-jax", "enginepool")}
        assert seen["build_info", *built.values()] == 1
        # Three outputs of three tokens.
        assert 0 < first < whole
        assert first + 2 * each == pytest.approx(whole)
        assert seen["engine_state", "0", "serving"] == 1
        assert seen["weight_version", "0"] == 1
        assert seen["num_requests_waiting",] == 0
        assert seen["engine_recoveries_total", "reset", "0"] == 0
        with callers() as threads, paused(one_sum):
            late = threads.submit(generate, client, SUM)
            until(lambda: waiting(one_sum))
            assert samples(client)["num_requests_waiting",] == 1
            assert samples(client)["engine_state", "0", "paused"] == 1
            one_sum.continue_generation()
            late.result()
            # The figures have the time that it waited.
            assert samples(client)["request_queue_time_seconds_count", "0"] == 4
        reload = {"model_path": one_sum.config.model, "weight_version": 1}
        client.post("/admin/reload_weights", json=reload)
        seen = samples(client)
        assert seen["weight_version", "1"] == 1
        assert seen["weight_update_seconds_count", "total"] == 1
    one_sum.update_weights(one_sum.config.model, weight_version=0)


def test_a_hosts_name_is_no_label(plain: Running) -> None:
    """A client that sends invented host names creates no metrics."""
    with plain.http() as client:
        count = ("http_requests_total", "ok", "/generate")
        before = samples(client).get(count, 0)
        body = {"text": SUM, "sampling_params": {"temperature": 0}}
        reply = client.post("/generate", json=body, headers={"Host": "127.0.0.1/made-up"})
        assert reply.json()["text"] == "19"
        seen = samples(client)
    assert seen[count] == before + 1
    assert not any("made-up" in label for sample in seen for label in sample)


def test_engines_ports(sums: EnginePool) -> None:
    """The pool's port serves with all engines, an engine's port with that engine."""
    with serving(sums, engine_ports=(0, 0, 0, 0)) as running:
        for engine in range(4):
            with running.http(engine) as client:
                results = client.post("/generate", json={"text": [SUM] * 4}).json()
                assert {result["meta_info"]["engine_index"] for result in results} == {engine}
                (load,) = client.get("/get_load").json()
                assert load["engine_index"] == engine
        with running.http() as client:
            results = client.post("/generate", json={"text": [SUM] * 16}).json()
            assert {result["meta_info"]["engine_index"] for result in results} == {0, 1, 2, 3}
            assert len(client.get("/get_load").json()) == 4


def test_pages(sums: EnginePool) -> None:
    """They load nothing from other hosts and need no key. Also the data of the first page."""
    with serving(sums, api_key="k") as running, running.http() as client:
        for path in ("/", "/docs"):
            page = client.get(path)
            assert page.headers["content-type"].startswith("text/html")
            assert "://" not in page.text.replace("http://www.w3.org/2000/svg", "")
        assert client.get("/openapi.json").status_code == 401
        client.headers["Authorization"] = "Bearer k"
        assert "/generate" in client.get("/openapi.json").json()["paths"]
        status = client.get("/status").json()
    assert [engine["state"] for engine in status["engines"]] == ["serving"] * 4
    assert status["weight_version"] == 0
    assert status["last_update"] is None


@pytest.fixture
def quick_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginepool.serve.history.INTERVAL_SECONDS", 0.2)


def test_last_minutes(quick_history: None, administered: Running, sums: EnginePool) -> None:
    """Latencies, errors and prefix hits of requests that ended between two samples, and the last
    update."""
    with administered.http() as client:
        until(lambda: client.get("/status").json()["history"])
        sums.flush_cache()
        for _ in range(2):
            generate(client, SUM)
        client.post("/generate", json={"text": ""})
        client.get("/nowhere")  # no request for tokens
        reloaded = client.post("/admin/reload_weights", json={"model_path": sums.config.model})
        failed = client.post("/admin/reload_weights", json={"model_path": "/nowhere"})

        def told() -> list[Any]:
            history = client.get("/status").json()["history"]
            return [sample for sample in history if sample["failed_share"]]

        until(told)
        status = client.get("/status").json()
    assert failed.status_code == 403
    assert status["last_update"]["weight_version"] == reloaded.json()["report"]["weight_version"]
    assert 0 < status["last_update"]["seconds"] < status["uptime"]
    assert "/nowhere" in status["last_reload_error"]
    assert isinstance(status["recoveries"], list)
    idle = status["history"][0]
    assert [idle[f"{name}_p95"] for name in ("first_token", "latency")] == [None, None]
    assert [idle[f"{name}_share"] for name in ("failed", "prefix_hit")] == [None, None]
    assert [s["failed_share"] for s in status["history"] if s["failed_share"]] in (
        [1 / 3],
        [0.5],
        [1],
    )
    timed = [sample for sample in status["history"] if sample["latency_p95"] is not None]
    assert timed
    for sample in timed:
        assert 0 < sample["first_token_p95"] <= sample["latency_p95"]
        assert 0 <= sample["prefix_hit_share"] < 1


@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}])
def test_failure_in_a_stream(more: dict[str, Any]) -> None:
    """The pool fails during a stream: an error object, [DONE], and 503 from then on."""
    long = {"max_new_tokens": 250, "ignore_eos": True}
    chat = {"model": "toy", "stream": True, "max_tokens": 250, "ignore_eos": True, **more}
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"text": SUM, "stream": True, "sampling_params": long},
        "/v1/completions": {**chat, "prompt": SUM},
        "/v1/chat/completions": {**chat, "messages": [{"role": "user", "content": SUM}]},
    }
    with (
        EnginePool(devices=1, **SMALL) as pool,
        serving(pool) as running,
        running.http() as client,
        ExitStack() as streams,
    ):
        assert client.get("/v1/models/toy").json()["id"] == "toy"  # the toy in the package
        replies = []
        for path, body in bodies.items():
            reply = streams.enter_context(client.stream("POST", path, json=body))
            lines = (line for line in reply.iter_lines() if line)
            next(lines)
            replies.append(lines)
        pool.close()
        for lines in replies:
            *_, error, done = lines
            assert done == "data: [DONE]"
            assert json.loads(error[6:])["error"]["type"] == "service_unavailable"
        for path, body in bodies.items():
            reply = client.post(path, json=body)
            assert reply.status_code == 503
            assert reply.headers["retry-after"]
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
