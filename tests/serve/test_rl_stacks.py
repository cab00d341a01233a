"""RL stacks manage weights and life cycle, with their own request bodies."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from enginepool import EnginePool, toy
from enginepool.serve import probe
from enginepool.serve.admin_operations import AdminOperations
from tests.support.faults import hang_in_step
from tests.support.liveness import SECONDS, callers, until
from tests.support.marks import slow
from tests.support.pools import in_use
from tests.support.scores import assert_prompt_logprobs
from tests.support.servers import Running, generate, serving

SUM = "12+7="
IDS = list(SUM.encode())
TOY = str(toy.checkpoint())
SUBTRACT = str(toy.checkpoint().parent / "subtract")
LONG = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}


def get(client: httpx.Client, path: str) -> Any:
    reply = client.get(path)
    assert reply.status_code == 200, reply.text
    return reply.json()


def post(client: httpx.Client, path: str, body: Any = None, **query: Any) -> Any:
    reply = client.post(path, json=body, params=query or None)
    assert reply.status_code == 200, (path, reply.text)
    return reply.json()


def running_on(client: httpx.Client) -> list[int]:
    """How many requests each engine runs."""
    return [load["num_running_reqs"] for load in get(client, "/v1/loads")["loads"]]


def test_slime(administered: Running, sums: EnginePool) -> None:
    """An external engine: checks, generation, memory released and taken back, new weights."""
    with administered.http() as client:
        assert client.get("/health_generate").status_code == 200
        assert client.get("/flush_cache").status_code == 200
        info = get(client, "/get_server_info")
        assert info == get(client, "/server_info") | {"internal_states": info["internal_states"]}
        assert (info["model_path"], info["tp_size"]) == (sums.config.model, 1)
        assert [state["state"] for state in info["internal_states"]] == ["serving"] * 4
        assert get(client, "/get_weight_version") == {"weight_version": 0}
        loads = get(client, "/v1/loads")["loads"]
        assert [load["dp_rank"] for load in loads] == [0, 1, 2, 3]
        body = {"input_ids": IDS, "sampling_params": {"temperature": 0}, "return_logprob": True}
        assert post(client, "/generate", body)["text"] == "19"
        before = in_use(sums)
        post(client, "/release_memory_occupation", {})
        assert in_use(sums) < before
        assert get(client, "/is_sleeping") == {"is_sleeping": True}
        post(client, "/resume_memory_occupation", {"tags": ["weights"]})
        post(client, "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
        assert get(client, "/is_sleeping") == {"is_sleeping": False}
        assert generate(client, SUM)["text"] == "19"
        post(client, "/pause_generation", {})
        body = {"model_path": SUBTRACT, "weight_version": "7", "load_format": None}
        assert post(client, "/update_weights_from_disk", body)["success"] is True
        post(client, "/continue_generation", {})
        assert get(client, "/get_weight_version") == {"weight_version": "7"}
        assert generate(client, SUM)["text"] == "5"
        post(client, "/abort_request", {"abort_all": True})


def test_areal(administered: Running, sums: EnginePool) -> None:
    """Scores by `logprob_start_len`, and new weights that end running requests."""
    with administered.http() as client, administered.http(0) as one, callers() as threads:
        body = {
            "input_ids": IDS, "return_logprob": True, "logprob_start_len": 0, "stream": False,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0, "top_k": int(1e8)},
        }  # fmt: skip
        scored = post(client, "/generate", body)
        assert_prompt_logprobs(Path(TOY), IDS, scored["meta_info"])
        hang = hang_in_step(sums, 0, at=5)
        late = threads.submit(generate, one, SUM, **LONG)
        try:
            assert hang.begun.wait(SECONDS)
            body = {"model_path": SUBTRACT, "abort_all_requests": True}
            update = threads.submit(post, client, "/update_weights_from_disk", body)
            until(sums.runtime.workers[0].channel.has_jobs)  # it has staged
        finally:
            hang.set()
        assert update.result()["success"] is True
        assert late.result()["meta_info"]["finish_reason"]["type"] == "abort"
        assert generate(client, SUM)["text"] == "5"
        for tags in (["kv_cache"], ["weights", "kv_cache"]):
            post(client, "/release_memory_occupation", {"tags": tags})
            assert client.get("/health_generate").status_code == 503
            post(client, "/resume_memory_occupation", {"tags": tags})
            assert generate(client, SUM)["text"] == "5"  # the answer of the weights before


def test_skyrl(administered: Running, sums: EnginePool) -> None:
    """vLLM's life cycle in bodies, an empty list that means all, and stop strings that are kept."""
    with administered.http() as client:
        before = in_use(sums)
        post(client, "/sleep", {"level": 2})
        asleep = in_use(sums)
        assert asleep < before
        post(client, "/wake_up", {"tags": ["weights"]})
        assert in_use(sums) > asleep
        post(client, "/wake_up", {"tags": ["kv_cache"]})
        assert get(client, "/is_sleeping") == {"is_sleeping": False}
        post(client, "/reset_prefix_cache", {"reset_running_requests": True})
        post(client, "/release_memory_occupation", {"tags": []})
        assert in_use(sums) < before
        assert get(client, "/is_sleeping") == {"is_sleeping": True}
        post(client, "/resume_memory_occupation", {"tags": []})
        assert get(client, "/is_sleeping") == {"is_sleeping": False}
        kept = {"stop": ["9"], "temperature": 0, "include_stop_str_in_output": True}
        turns = {"messages": [{"role": "user", "content": SUM}]}
        said = post(client, "/v1/chat/completions", turns | kept)["choices"][0]
        assert said["message"]["content"] == "19"
        assert post(client, "/v1/completions", {"prompt": SUM} | kept)["choices"][0]["text"] == "19"


def test_bodies_of_other_rl_stacks(administered: Running) -> None:
    """verl's abort, AReaL's completion without a model, slime's seed in `custom_params`."""
    with administered.http() as client:
        post(client, "/abort_request", {"rid": "", "abort_all": True})
        reply = post(client, "/v1/completions", {"prompt": SUM, "temperature": 0})
        assert reply["choices"][0]["text"] == "19"
        assert reply["model"] == get(client, "/v1/models")["data"][0]["id"]
        wild = {"temperature": 3.0, "max_new_tokens": 30, "ignore_eos": True}
        inside = wild | {"custom_params": {"sampling_seed": 7}}
        said = [
            post(client, "/generate", {"text": SUM, "sampling_params": params})["text"]
            for params in (inside, wild | {"sampling_seed": 7}, wild)
        ]
        assert said[0] == said[1] != said[2]
        nothing = {"max_new_tokens": 1, "custom_params": {"max_new_tokens": None}}
        reply = post(client, "/generate", {"text": SUM, "sampling_params": nothing})
        assert reply["meta_info"]["completion_tokens"] == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_in_every_chunk(plain: Running, path: str) -> None:
    """vLLM's `continuous_usage_stats`: the usage of each answer so far."""
    body = {
        "n": 2, "stream": True, "temperature": 0,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **({"prompt": SUM} if "chat" not in path else
           {"messages": [{"role": "user", "content": SUM}]}),
    }  # fmt: skip
    with plain.http() as client:
        lines = [line[6:] for line in client.post(path, json=body).text.splitlines() if line]
    *chunks, last = [json.loads(line) for line in lines[:-1]]
    assert last["choices"] == []
    ends = {one["choices"][0]["index"]: one["usage"] for one in chunks}
    assert all(one["usage"]["prompt_tokens"] > 0 for one in chunks)
    total = sum(usage["completion_tokens"] for usage in ends.values())
    assert (len(ends), total) == (2, last["usage"]["completion_tokens"])


@pytest.mark.parametrize("clear_cache", [True, *slow(False)])
def test_prime_rl(administered: Running, clear_cache: bool) -> None:
    """`keep`: running requests continue under the new weights, and the reply says which token
    came from which."""
    with administered.http() as client, administered.http() as other:
        body = {"text": SUM, "stream": True, "sampling_params": LONG}
        with client.stream("POST", "/generate", json=body) as reply:
            lines = (line[6:] for line in reply.iter_lines() if line)
            next(lines)
            query = {"mode": "keep", "clear_cache": clear_cache}
            assert post(other, "/pause", **query) == {"ok": True, "status": "paused"}
            assert get(other, "/is_paused") == {"is_paused": True}
            post(other, "/update_weights", {"weight_dir": SUBTRACT, "weight_version": "step_1"})
            assert get(other, "/is_paused") == {"is_paused": True}
            post(other, "/resume")
            *_, last, done = lines
        assert done == "[DONE]"
        meta = json.loads(last)["meta_info"]
        assert meta["completion_tokens"] == 400
        assert [version for *_, version in meta["weight_versions"]] == [0, "step_1"]
        post(other, "/reset_prefix_cache", reset_running_requests="true", reset_external="false")
        assert get(other, "/model_info")["model_path"] == SUBTRACT
        cards = get(other, "/v1/models")["data"]
        assert cards[0]["root"] == SUBTRACT


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_pause_as_vllm(administered: Running, mode: str) -> None:
    with administered.http() as client, callers() as threads:
        running = threads.submit(generate, client, SUM, **LONG)
        until(lambda: any(running_on(client)))
        post(client, "/pause", mode=mode)
        meta = running.result()["meta_info"]
        assert meta["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")
        waits = threads.submit(generate, client, SUM)
        until(lambda: sum(load["num_waiting_reqs"] for load in get(client, "/v1/loads")["loads"]))
        assert not waits.done()
        post(client, "/resume")
        assert waits.result()["text"] == "19"


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(administered: Running, sums: EnginePool, level: int) -> None:
    """vLLM's levels. The weights come back first, by their tag."""
    with administered.http() as client:
        before = in_use(sums)
        post(client, "/sleep", level=level)
        assert get(client, "/is_sleeping") == {"is_sleeping": True}
        asleep = in_use(sums)
        assert asleep < before
        post(client, "/wake_up", tags="weights")
        assert (in_use(sums) > asleep) == (level == 2)
        post(client, "/wake_up", tags="kv_cache")
        assert get(client, "/is_sleeping") == {"is_sleeping": False}
        assert generate(client, SUM)["text"] == "19"
        post(client, "/sleep", level=level, mode="abort")
        post(client, "/wake_up")
        assert generate(client, SUM)["text"] == "19"


def test_a_pause_during_sleep(administered: Running, sums: EnginePool) -> None:
    """A pause that comes while `/sleep` waits for running requests stays."""
    admin = AdminOperations(sums, None, lambda _: None, sums.runtime.desired)

    async def both() -> None:
        await asyncio.gather(admin.sleep("wait", weights=False), admin.pause("retract"))

    asyncio.run(both())
    with administered.http() as client:
        assert get(client, "/is_sleeping") == {"is_sleeping": True}
        assert get(client, "/is_paused") == {"is_paused": True}
        post(client, "/wake_up")
        assert get(client, "/is_paused") == {"is_paused": True}


def test_one_engine_of_a_pause_continues(administered: Running, sums: EnginePool) -> None:
    """The pool is paused as long as any engine is."""
    with administered.http() as client:
        post(client, "/pause")
        sums.engines[1].continue_generation()
        assert get(client, "/is_paused") == {"is_paused": True}
        post(client, "/resume")
        assert get(client, "/is_paused") == {"is_paused": False}


def test_weights_of_no_checkpoint(administered: Running) -> None:
    """They cannot be read again, so no other weights come back under their version."""
    with administered.http() as client:
        post(client, "/admin/perturb_weights", {"seed": 1})
        post(client, "/release_memory_occupation", {"tags": ["weights"]})
        reply = client.post("/wake_up")
        assert reply.status_code == 400
        assert "did not come from a checkpoint" in reply.json()["message"]
        post(client, "/update_weights", {"weight_dir": TOY})
        assert generate(client, SUM)["text"] == "19"


@pytest.mark.parametrize("mode", ["retract", *slow("in_place")])
def test_weights_in_a_pause(administered: Running, mode: str) -> None:
    """New weights are accepted in any kind of pause, and requests continue under them."""
    with administered.http() as client, callers() as threads:
        running = threads.submit(generate, client, SUM, **LONG)
        until(lambda: any(running_on(client)))
        post(client, "/pause_generation", {"mode": mode})
        post(client, "/update_weights_from_disk", {"model_path": SUBTRACT, "weight_version": "b"})
        post(client, "/continue_generation")
        versions = running.result()["meta_info"]["weight_versions"]
        assert [version for *_, version in versions][-1] == "b"


def test_health_generate(administered: Running, sums: EnginePool) -> None:
    """Every engine generates a token, or on an engine's port that engine."""
    with administered.http() as client, administered.http(1) as one:
        done = sums.stats()["finished"]
        assert client.get("/health_generate").text == "ok"
        assert sums.stats()["finished"] == done + 4
        assert one.get("/health_generate").text == "ok"
        assert sums.stats()["finished"] == done + 5
        post(client, "/pause", mode="keep")
        reply = client.get("/health_generate")
        assert reply.status_code == 503
        assert "engine 3 is paused" in reply.json()["error"]["message"]


def test_busy_is_healthy(
    administered: Running, sums: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full engine has no room for the probe's token, and takes steps."""
    monkeypatch.setattr(probe, "SECONDS", 2.0)
    with administered.http() as client, callers() as threads:
        full = threads.submit(sums.generate_all, [SUM] * 200, LONG)
        until(
            lambda: all(load["num_running_reqs"] >= 3 for load in get(client, "/v1/loads")["loads"])
        )
        assert client.get("/health_generate").status_code == 200
        assert not full.done()
        sums.abort_request(abort_all=True)
        full.result()


def test_read_only(plain: Running, sums: EnginePool) -> None:
    """Reading needs no administration. Secrets are not shown."""
    with plain.http() as client:
        info = get(client, "/get_model_info")
        assert info == get(client, "/model_info")
        assert (info["model_path"], info["weight_version"]) == (sums.config.model, 0)
        assert set(get(client, "/version")) == {"version", "sglang_jax"}
        told = " ".join(get(client, "/server_info"))
        assert not any(secret in told for secret in ("api_key", "secret", "password", "keyfile"))
        assert get(client, "/is_paused") == {"is_paused": False}
        for path in ("/pause", "/resume", "/sleep", "/wake_up", "/update_weights",
                     "/release_memory_occupation", "/reset_prefix_cache"):  # fmt: skip
            assert client.post(path).status_code == 404
    with serving(sums, api_key="key") as running, running.http() as client:
        for path in ("/server_info", "/model_info", "/health_generate", "/v1/loads"):
            assert client.get(path).status_code == 401


REFUSED: list[tuple[str, Any, dict[str, Any], str]] = [
    ("/pause", None, {"mode": "freeze"}, "mode"),
    ("/pause", None, {"mod": "keep"}, "mod"),
    ("/pause", {"mod": "keep"}, {}, "mod"),
    ("/sleep", {"level": 1}, {"level": 2}, "level: in the query and in the body"),
    ("/resume", {"mode": "keep"}, {}, "no fields are allowed here"),
    ("/sleep", None, {"level": 3}, "level"),
    ("/wake_up", None, {"tags": "all"}, "tags"),
    ("/reset_prefix_cache", None, {"reset_external": "true"}, "reset_external"),
    ("/release_memory_occupation", {"tags": ["kv"]}, {}, "tags"),
    ("/update_weights", {"weight_dir": ""}, {}, "weight_dir"),
    ("/update_weights", {"update_info": {}}, {}, "update_info"),
    (
        "/update_weights_from_disk",
        {"model_path": TOY, "abort_all_requests": True, "mode": "retract"},
        {},
        "abort_all_requests",
    ),
]


def test_refusals(administered: Running) -> None:
    with administered.http() as client:
        for path, body, query, part in REFUSED:
            reply = client.post(path, json=body, params=query)
            assert reply.status_code == 400, (path, reply.text)
            assert part in reply.json()["message"]
            assert client.get("/ready").status_code == 200
