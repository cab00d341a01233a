"""Adapters over HTTP: named in requests, and loaded by administrators."""

import json
import shutil
from collections.abc import Callable, Iterator
from math import exp
from pathlib import Path
from typing import Any

import httpx
import pytest

from enginepool import EnginePool
from tests.lora.conftest import TOKENS, World
from tests.lora.test_exact import GREEDY, NAMES, PROMPTS, check, load
from tests.support.adapters import agrees, config, random_adapter, write_adapter
from tests.support.liveness import callers, hanging_in_steps, until
from tests.support.servers import Running, serving

TURNS: Any = [{"role": "user", "content": "12+7="}]
LONG = GREEDY | {"max_new_tokens": 60}


@pytest.fixture(scope="module")
def server(opened: EnginePool, world: World) -> Iterator[Running]:
    with serving(opened, enable_admin=True, model_root=world.folders["a"].parent) as running:
        yield running


@pytest.fixture
def client(server: Running, adapted: EnginePool) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def post(client: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == status, reply.text
    is_json = "json" in reply.headers["content-type"]
    return reply.json() if is_json else reply.text


def as_result(ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    entries = [(value, token) for value, token in zip(logprobs, ids, strict=True)]
    return {"output_ids": ids, "meta_info": {"output_token_logprobs": entries}}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("name", ["a", "b", None])
def test_openais_model(
    path: str, name: str | None, client: httpx.Client, adapted: EnginePool, world: World
) -> None:
    load(adapted, world, "a", "b")
    body: Any = {
        "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True,
        "return_tokens_as_token_ids": True, "model": name or str(world.model),
    }  # fmt: skip
    if chat := "chat" in path:
        made = post(client, path, **body, messages=TURNS, logprobs=True)
        values = [entry["logprob"] for entry in made["choices"][0]["logprobs"]["content"]]
    else:
        made = post(client, path, **body, prompt=PROMPTS[1], logprobs=0)
        values = made["choices"][0]["logprobs"]["token_logprobs"]
    assert made["model"] == body["model"]
    (choice,) = made["choices"]
    prompt = (made if chat else choice)["prompt_token_ids"]
    (expected,) = world.expected(name, [prompt])
    assert agrees(as_result(choice["token_ids"], values), expected)


def test_other_routes(client: httpx.Client, adapted: EnginePool, world: World) -> None:
    """vLLM's route for ids, OpenAI's responses, sglang's scores."""
    load(adapted, world, "a")
    sampling = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0}
    made = post(
        client,
        "/inference/v1/generate",
        model="a",
        token_ids=PROMPTS[1],
        sampling_params=sampling,
    )
    (choice,) = made["choices"]
    values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert agrees(as_result(choice["token_ids"], values), world.expected("a", [PROMPTS[1]])[0])

    body: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    chat = post(client, "/v1/chat/completions", model="a", messages=TURNS, max_tokens=8, **body)[
        "choices"
    ][0]["message"]["content"]
    answers = {}
    for model in ("a", str(world.model)):
        made = post(
            client, "/v1/responses", model=model, input="12+7=", max_output_tokens=8, **body
        )
        answers[model] = made["output"][0]["content"][0]["text"]
        assert made["model"] == model
    assert answers["a"] == chat != answers[str(world.model)]

    query, labels = PROMPTS[1], [50, 60, 70]
    for model, name in (("a", "a"), (str(world.model), None)):
        made = post(
            client, "/v1/score", model=model, query=query, items=[[30]], label_token_ids=labels
        )
        scores: Any = adapted.score(
            input_ids=[[*query, 30]] * 3, continuation_ids=[[i] for i in labels], lora_path=name
        )
        values = [exp(score["logprobs"][0]) for score in scores]
        assert made["scores"][0] == pytest.approx(values, rel=1e-4)


def test_generate(client: httpx.Client, adapted: EnginePool, world: World) -> None:
    """One name for all prompts, one for each prompt, and a stream."""
    load(adapted, world, "a", "b")
    body: Any = {"sampling_params": GREEDY, "return_logprob": True}
    results = post(client, "/generate", input_ids=PROMPTS, lora_path=NAMES, **body)
    check(world, PROMPTS, NAMES, results)
    versions = {name: adapted.stats()["lora_adapters"][name]["weight_version"] for name in "ab"}
    for name, result in zip(NAMES, results, strict=True):
        meta = result["meta_info"]
        assert meta.get("lora_path") == name
        assert meta.get("lora_versions") == (name and [[0, TOKENS, versions[name]]])
    results = post(client, "/generate", input_ids=PROMPTS[:2], lora_path="b", **body)
    check(world, PROMPTS[:2], ["b", "b"], results)
    reply = client.post(
        "/generate", json=body | {"input_ids": PROMPTS[0], "lora_path": "a", "stream": True}
    )
    *_, last, done = [line[6:] for line in reply.text.splitlines() if line]
    assert done == "[DONE]"
    check(world, [PROMPTS[0]], ["a"], [json.loads(last)])
    assert json.loads(last)["meta_info"]["lora_path"] == "a"
    wrong = post(client, "/generate", 400, input_ids=PROMPTS[0], lora_path="c")
    assert "lora_path='c': no such adapter; loaded: a, b" in wrong["error"]["message"]
    wrong = post(client, "/generate", 400, input_ids=PROMPTS[:2], lora_path=["a"])
    assert "1 entries for 2 prompts" in wrong["error"]["message"]


def test_models_that_are_not_served(
    client: httpx.Client, adapted: EnginePool, world: World, pool: EnginePool
) -> None:
    """The reply is 404 if adapters are loaded. A pool without adapters takes any name."""
    load(adapted, world, "a")
    cards = client.get("/v1/models").json()["data"]
    base = str(world.model)
    assert [(c["id"], c["root"], c["parent"]) for c in cards] == [
        (base, base, None),
        ("a", str(world.folders["a"]), base),
    ]
    assert client.get("/v1/models/a").json()["parent"] == base
    assert client.get("/v1/models/b").status_code == 404
    for path, body in (
        ("/v1/completions", {"prompt": [1]}),
        ("/v1/chat/completions", {"messages": TURNS}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/score", {"query": [1], "items": [[2]], "label_token_ids": [3]}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        error = post(client, path, 404, model="b", **body)["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "'b' does not exist" in error["message"]
    wrong = post(client, "/v1/completions", 400, prompt=[1], lora_path="a")
    assert "name the adapter as model" in wrong["error"]["message"]
    with serving(pool) as plain, plain.http() as other:
        assert post(other, "/v1/completions", prompt=[1], max_tokens=1, model="b")["model"] == "b"
        wrong = post(other, "/generate", 400, input_ids=[1], lora_path="a")
        assert "lora_path='a': this pool takes no adapters" in wrong["error"]["message"]
        assert len(other.get("/v1/models").json()["data"]) == 1


def test_sglangs_loads(client: httpx.Client, adapted: EnginePool, world: World) -> None:
    """A second load of a name is a new version."""
    for name, folder in (("x", "a"), ("y", "c"), ("x", "b")):
        path = str(world.folders[folder])
        made = post(client, "/load_lora_adapter", lora_name=name, lora_path=path)
        assert made["success"] is True
        assert made["loaded_adapters"][name] == path
    made = post(client, "/generate", input_ids=PROMPTS[0], sampling_params=GREEDY,
                return_logprob=True, lora_path="x")  # fmt: skip
    check(world, [PROMPTS[0]], ["b"], [made])
    body: Any = {"lora_name": "x", "lora_path": "a", "weight_version": "step-7", "mode": "in_place"}
    post(client, "/load_lora_adapter", **body, pinned=False)
    assert adapted.stats()["lora_adapters"]["x"]["weight_version"] == "step-7"
    made = post(client, "/unload_lora_adapter", lora_name="x")
    assert list(made["loaded_adapters"]) == ["y"]
    made = post(client, "/unload_lora_adapter", 400, lora_name="x")
    assert made["success"] is False
    assert "lora_name='x': no such adapter" in made["error_message"]


def test_vllms_loads(client: httpx.Client, world: World) -> None:
    body: Any = {"lora_name": "x", "lora_path": str(world.folders["a"])}
    assert "Success" in post(client, "/v1/load_lora_adapter", **body)
    error = post(client, "/v1/load_lora_adapter", 400, **body)["error"]
    assert "already been loaded" in error["message"]
    body["lora_path"] = str(world.folders["b"])
    post(client, "/v1/load_lora_adapter", **body, load_inplace=True)
    made = post(client, "/generate", input_ids=PROMPTS[0], sampling_params=GREEDY,
                return_logprob=True, lora_path="x")  # fmt: skip
    check(world, [PROMPTS[0]], ["b"], [made])
    assert "Success" in post(client, "/v1/unload_lora_adapter", lora_name="x")
    error = post(client, "/v1/unload_lora_adapter", 404, lora_name="x")["error"]
    assert "cannot be found" in error["message"]
    error = post(client, "/v1/load_lora_adapter", 404, lora_name="x", lora_path="nowhere")["error"]
    assert "no such directory" in error["message"]


def test_only_administrators_load(adapted: EnginePool, world: World) -> None:
    """As for weights: administrators, from below --model-root."""
    routes = ["/load_lora_adapter", "/unload_lora_adapter"]
    routes += [f"/v1{route}" for route in routes]
    body: Any = {"lora_name": "x", "lora_path": str(world.folders["a"])}
    with serving(adapted) as running, running.http() as client:
        assert [client.post(route, json=body).status_code for route in routes] == [404] * 4
    with serving(adapted, enable_admin=True, admin_token="t", api_key="k") as running:
        with running.http(headers={"Authorization": "Bearer k"}) as client:
            assert [client.post(route, json=body).status_code for route in routes] == [401] * 4
            assert "error" in client.post(routes[2], json=body).json()["error"]["type"]
        with running.http(headers={"Authorization": "Bearer t"}) as client:
            assert client.post(routes[0], json=body).status_code == 403  # no --model-root
    with serving(adapted, enable_admin=True, model_root=world.folders["b"]) as running:
        with running.http() as client:
            for path in (body["lora_path"], "../a", "/etc"):
                made = post(client, routes[0], 403, lora_name="x", lora_path=path)
                assert "outside of --model-root" in made["message"]
        with running.http(headers={"Origin": "http://127.0.0.1"}) as client:
            assert [client.post(route, json=body).status_code for route in routes] == [403] * 4
    assert adapted.stats()["lora_adapters"] == {}


@pytest.fixture
def broken(world: World) -> Iterator[Callable[[str], str]]:
    """Folders of broken adapters, by what is wrong."""
    root = world.folders["a"].parent / "broken"
    arrays = world.arrays["a"]
    some = next(iter(arrays))
    half = {name: value for name, value in arrays.items() if name != some}
    wide = random_adapter(world.model, 0, rank=5)
    write_adapter(root / "half", half, config(4))
    write_adapter(root / "wide", wide, config(5))
    write_adapter(root / "other rank", arrays, config(3))
    write_adapter(root / "nan", arrays | {some: arrays[some] * float("nan")}, config(4))
    write_adapter(root / "no tensors", arrays, config(4))
    (root / "no tensors" / "adapter_model.safetensors").unlink()
    write_adapter(root / "no config", arrays, config(4))
    (root / "no config" / "adapter_config.json").unlink()
    yield lambda name: str(root / name)
    shutil.rmtree(root)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("half", "without its lora_A"),
        ("wide", "rank 5 is more than max_lora_rank=4"),
        ("other rank", "its configuration says r=3"),
        ("nan", "NaN"),
        ("no tensors", "adapter_model"),
        ("no config", "no adapter_config"),
    ],
)
def test_broken_folders(
    name: str, said: str, client: httpx.Client, broken: Callable[[str], str], world: World
) -> None:
    """The earlier version stays."""
    post(client, "/load_lora_adapter", lora_name="x", lora_path="a")
    made = post(client, "/load_lora_adapter", 400, lora_name="x", lora_path=broken(name))
    assert said in made["error_message"]
    made = post(client, "/generate", input_ids=PROMPTS[0], sampling_params=GREEDY,
                return_logprob=True, lora_path="x")  # fmt: skip
    check(world, [PROMPTS[0]], ["a"], [made])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"lora_path": "a"}, "lora_name"),
        ({"lora_name": "", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "x" * 257, "lora_path": "a"}, "lora_name"),
        ({"lora_name": 7, "lora_path": "a"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "\0"}, "null"),
        ({"lora_name": "x", "lora_path": "a" * 5000}, "too long"),
        ({"lora_name": "x", "lora_path": "a", "pinned": True}, "pinned"),
        ({"lora_name": "x", "lora_path": "a", "lora_id": "1"}, "lora_id"),
        ({"lora_name": "x", "lora_path": "a", "mode": "now"}, "mode"),
    ],
)
def test_bad_loads(body: dict[str, Any], said: str, client: httpx.Client) -> None:
    assert said in post(client, "/load_lora_adapter", 400, **body)["message"]
    assert client.get("/v1/models").json()["data"][1:] == []


def test_a_name_with_a_slash(client: httpx.Client, world: World) -> None:
    """It is a valid name. The model's own name is taken."""
    post(client, "/load_lora_adapter", lora_name="team/run-1", lora_path="a")
    assert client.get("/v1/models/team/run-1").json()["id"] == "team/run-1"
    made = post(
        client, "/v1/completions", model="team/run-1", prompt=PROMPTS[0], temperature=0,
        max_tokens=4, ignore_eos=True, return_token_ids=True,
    )  # fmt: skip
    assert made["choices"][0]["token_ids"] == world.expected("a", [PROMPTS[0]], 4)[0].ids
    made = post(client, "/load_lora_adapter", 400, lora_name=str(world.model), lora_path="a")
    assert "name of the model itself" in made["message"]


def test_unload_while_streaming(client: httpx.Client, adapted: EnginePool, world: World) -> None:
    load(adapted, world, "a")
    body = {"input_ids": PROMPTS[0], "lora_path": "a", "sampling_params": LONG, "stream": True,
            "return_logprob": True}  # fmt: skip
    with client.stream("POST", "/generate", json=body) as reply:
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        with httpx.Client(base_url=client.base_url) as other:
            post(other, "/unload_lora_adapter", lora_name="a")
            post(other, "/load_lora_adapter", lora_name="b", lora_path="b")
        *_, last, done = lines
    assert done == "data: [DONE]"
    check(world, [PROMPTS[0]], ["a"], [json.loads(last[6:])])


def test_two_loads_of_one_name(client: httpx.Client, world: World) -> None:
    """With vLLM's route one client gets the error that it is loaded. With sglang's both loads
    make a version."""
    bodies = [{"lora_name": "x", "lora_path": path} for path in "ab"]
    with callers() as threads:
        replies = list(
            threads.map(lambda body: client.post("/v1/load_lora_adapter", json=body), bodies)
        )
        assert sorted(reply.status_code for reply in replies) == [200, 400]
        replies = list(
            threads.map(lambda body: client.post("/load_lora_adapter", json=body), bodies)
        )
    assert [reply.status_code for reply in replies] == [200, 200]
    made = post(client, "/generate", input_ids=PROMPTS[0], sampling_params=GREEDY,
                return_logprob=True, lora_path="x")  # fmt: skip
    (card,) = client.get("/v1/models").json()["data"][1:]
    check(world, [PROMPTS[0]], [Path(card["root"]).name], [made])


@pytest.mark.parametrize(
    ("stop", "go_on"),
    [
        ("/pause_generation", "/continue_generation"),
        ("/sleep", "/wake_up"),
        ("/sleep?level=2", "/wake_up"),
    ],
)
def test_loads_while_nothing_is_generated(
    stop: str, go_on: str, client: httpx.Client, world: World
) -> None:
    """The engines are paused, without KV cache or without weights. The adapter is there
    afterwards."""
    post(client, "/load_lora_adapter", lora_name="x", lora_path="a")
    assert client.post(stop).status_code == 200
    try:
        post(client, "/load_lora_adapter", lora_name="x", lora_path="b")
        post(client, "/load_lora_adapter", lora_name="y", lora_path="c")
    finally:
        assert client.post(go_on).status_code == 200
    made = post(client, "/generate", input_ids=PROMPTS[:2], sampling_params=GREEDY,
                return_logprob=True, lora_path=["x", "y"])  # fmt: skip
    check(world, PROMPTS[:2], ["b", "c"], made)


def test_a_client_that_leaves_during_a_load(
    client: httpx.Client, adapted: EnginePool, world: World
) -> None:
    """The load goes on."""
    with hanging_in_steps(adapted) as hangs, callers() as threads:
        calls = [threads.submit(adapted.generate, input_ids=PROMPTS[i]) for i in range(2)]
        until(lambda: any(hang.begun.is_set() for hang in hangs))
        with pytest.raises(httpx.TimeoutException):
            client.post(
                "/load_lora_adapter", json={"lora_name": "x", "lora_path": "a"}, timeout=0.5
            )
        for hang in hangs:
            hang.set()
        assert all(call.result() for call in calls)
    until(lambda: "x" in adapted.stats()["lora_adapters"])
