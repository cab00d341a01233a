"""Token ids in and out, with the bodies that trainers send."""

import json
from typing import Any

import pytest

from enginepool import EnginePool
from tests.serve.test_native import samples
from tests.support.servers import Running, serving

SUM = "12+7="
IDS = list(SUM.encode())
ANSWER = [*b"19", 258]
TURNS: Any = [{"role": "user", "content": SUM}]
NAMES = [f"token_id:{token}" for token in ANSWER]


def post(running: Running, path: str, body: dict[str, Any]) -> Any:
    with running.http() as client:
        reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(running: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with running.http() as client:
        reply = client.post(path, json=body | {"stream": True})
    assert reply.status_code == 200, reply.text
    *lines, done = [line[6:] for line in reply.text.splitlines() if line]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


def test_what_verifiers_adds(plain: Running) -> None:
    """To a turn that continues the ids of the turn before: the position from which it wants
    experts, if it wants any."""
    params = {"temperature": 0, "max_tokens": 8, "routed_experts_prompt_start": 3}
    made = post(plain, "/inference/v1/generate", {"token_ids": IDS, "sampling_params": params})
    assert made["choices"][0]["token_ids"] == ANSWER


def test_what_trl_sends(plain: Running) -> None:
    """Its body for completions. Every position of its log-probabilities can be read by id."""
    body = {
        "model": "toy", "prompt": [IDS, list(b"30+4=")], "return_token_ids": True,
        "return_tokens_as_token_ids": True, "n": 2, "repetition_penalty": 1.0, "temperature": 0.01,
        "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 16, "logprobs": 0,
        "seed": (1 << 62) + 5,
    }  # fmt: skip
    choices = post(plain, "/v1/completions", body)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices[::2]] == body["prompt"]
    assert [choice["token_ids"] for choice in choices[:2]] == [ANSWER] * 2
    for choice in choices:
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
        for name, value, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        ):
            assert top == {name: value}
    chat = {
        "model": "toy", "messages": TURNS, "n": 1, "repetition_penalty": 1.0, "temperature": 0,
        "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 16, "logprobs": True,
        "top_logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    made = post(plain, "/v1/chat/completions", chat)
    (choice,) = made["choices"]
    assert choice["token_ids"] == ANSWER
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == NAMES
    said = post(plain, "/tokenize", {"model": "toy", "messages": TURNS})
    assert made["prompt_token_ids"] == said["tokens"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams(one_sum: EnginePool, path: str) -> None:
    """Each id comes once, however chunks are cut. The prompt's ids come with the first chunk."""
    body: dict[str, Any] = {
        "model": "toy", "temperature": 0, "n": 2, "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    chat = path.endswith("chat/completions")
    body |= {"messages": TURNS} if chat else {"prompt": IDS}
    with serving(one_sum) as running:
        chunks = events(running, path, body)
    ids: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            ids[choice["index"]] += choice["token_ids"]
    assert ids == {0: ANSWER, 1: ANSWER}
    if chat:
        assert [bool(chunk.get("prompt_token_ids")) for chunk in chunks].count(True) == 1
    else:
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        given = [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice]
        assert given == [IDS, IDS]


def test_what_prime_rl_sends(plain: Running) -> None:
    """The body of its client's renderers, and the parts of the reply that they read."""
    body = {
        "model": "toy",
        "token_ids": IDS,
        "sampling_params": {
            "temperature": 0.01, "max_tokens": 16, "top_p": 1.0, "seed": None,
            "stop_token_ids": [258], "logprobs": 1, "skip_special_tokens": False,
        },
        "cache_salt": "step-3", "priority": 0,
    }  # fmt: skip
    made = post(plain, "/inference/v1/generate", body)
    (choice,) = made["choices"]
    assert choice["token_ids"] == ANSWER
    assert choice["finish_reason"] == "stop"
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == NAMES
    assert all(-0.5 < entry["logprob"] <= 0 for entry in content)
    assert [entry["top_logprobs"][0]["token"] for entry in content] == NAMES
    assert made["request_id"]
    assert made["usage"]["prompt_tokens"] == 5


def test_generate_streams_and_samples(plain: Running) -> None:
    sampling = {"temperature": 0, "n": 2, "logprobs": 0}
    body = {"token_ids": IDS, "request_id": "mine", "sampling_params": sampling}
    chunks = events(plain, "/inference/v1/generate", body)
    ids: dict[int, list[int]] = {0: [], 1: []}
    names: dict[int, list[str]] = {0: [], 1: []}
    for chunk in chunks:
        assert chunk["request_id"] == "mine"
        (choice,) = chunk["choices"]
        ids[choice["index"]] += choice["token_ids"]
        names[choice["index"]] += [entry["token"] for entry in choice["logprobs"]["content"]]
    assert ids == {0: ANSWER, 1: ANSWER}
    assert names == {0: NAMES, 1: NAMES}
    made = post(plain, "/inference/v1/generate", body)
    assert [choice["index"] for choice in made["choices"]] == [0, 1]
    sampling = {"max_tokens": 0, "prompt_logprobs": 0}
    made = post(plain, "/inference/v1/generate", {"token_ids": IDS, "sampling_params": sampling})
    assert [list(place) for place in made["prompt_logprobs"][1:]] == [[str(i)] for i in IDS[1:]]


def test_turns_keep_the_prefix_cache(sums: EnginePool) -> None:
    """The next turn's prompt is this turn's ids and more. On the engine that had the turns
    before, no cached token is computed again. With another salt all are."""
    sums.flush_cache()
    prompt = list(b"1+1=2. 2+2=4. 12+7=")
    known = 0
    with serving(sums, engine_ports=(0, 0, 0, 0)) as running, running.http(2) as client:

        def turn(salt: str) -> Any:
            body = {"token_ids": prompt, "sampling_params": {"temperature": 0}, "cache_salt": salt}
            reply = client.post("/inference/v1/generate", json=body)
            assert reply.status_code == 200, reply.text
            return reply.json()

        for _ in range(4):
            made = turn("a")
            assert made["usage"]["prompt_tokens_details"]["cached_tokens"] == known
            ids = made["choices"][0]["token_ids"]
            known = len(prompt) + len(ids) - 1  # the last one was sampled and not computed
            prompt = [*prompt, *ids, *b" 30+4="]
        assert turn("b")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_tokenize(plain: Running) -> None:
    """In both forms. A conversation becomes the ids that are answered."""
    said = post(plain, "/tokenize", {"model": "toy", "prompt": SUM, "return_token_strs": True})
    with plain.http() as client:
        (card,) = client.get("/v1/models").json()["data"]
    assert said == {
        "count": 5, "max_model_len": card["max_model_len"], "tokens": IDS,
        "token_strs": said["token_strs"],
    }  # fmt: skip
    assert len(said["token_strs"]) == 5
    many = post(plain, "/tokenize", {"prompt": [SUM, "1"]})
    assert (many["count"], many["tokens"]) == ([5, 1], [IDS, [49]])
    assert post(plain, "/detokenize", {"model": "toy", "tokens": [*IDS, 258]}) == {
        "prompt": "12+7=<|im_end|>"
    }
    whole = [49] * said["max_model_len"]  # a prompt and its output
    assert post(plain, "/detokenize", {"tokens": whole}) == {"prompt": "1" * len(whole)}
    turns = post(plain, "/tokenize", {"messages": TURNS})["tokens"]
    made = post(plain, "/generate", {"input_ids": turns, "sampling_params": {"temperature": 0}})
    assert made["text"] == "19"


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        ("/tokenize", {"prompt": "a", "messages": TURNS}, "not both"),
        ("/tokenize", {}, "either"),
        ("/tokenize", {"messages": TURNS, "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"messages": TURNS, "chat_template_kwargs": {"tokenize": 1}}, "tokenize"),
        ("/tokenize", {"prompt": "1" * 100000}, "too long"),
        ("/detokenize", {"tokens": [1 << 40]}, "vocabulary"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, "no prompt"),
        ("/inference/v1/generate", {"token_ids": IDS}, "sampling_params"),
        ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": {"topp": 1}}, "topp"),
        ("/inference/v1/generate", {"token_ids": [[1]], "sampling_params": {}}, "token_ids"),
        (
            "/inference/v1/generate",
            {"token_ids": IDS, "sampling_params": {}, "priority": 3},
            "priority",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": IDS, "sampling_params": {"max_tokens": 5000}},
            "5000",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": IDS, "sampling_params": {"prompt_logprobs": 0}, "stream": True},
            "prompt_logprobs is not supported in a stream",
        ),
    ],
)
def test_refusals(plain: Running, path: str, body: dict[str, Any], part: str) -> None:
    with plain.http() as client:
        reply = client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert part in reply.json()["error"]["message"]


def test_clamp(sums: EnginePool) -> None:
    """Only with the server's option: the length that AReaL asks for is cut to the room."""
    prompt = IDS * 90
    body = {
        "input_ids": prompt, "return_logprob": True,
        "sampling_params": {"max_new_tokens": 16384, "top_k": int(1e8), "ignore_eos": True,
                            "temperature": 0},
    }  # fmt: skip
    with serving(sums, clamp_max_new_tokens=True) as running:
        made = post(running, "/generate", body)
        with running.http() as client:
            (card,) = client.get("/v1/models").json()["data"]
            assert made["meta_info"]["completion_tokens"] == card["max_model_len"] - len(prompt)
            assert made["meta_info"]["finish_reason"]["type"] == "length"
            metric = ("http_requests_total", "ok", "/generate")
            assert samples(client)[metric] == 1
    with serving(sums) as running, running.http() as client:
        assert client.post("/generate", json=body).status_code == 400


@pytest.mark.parametrize("seed", [0, -1, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, -(1 << 63)])
def test_wide_seeds(plain: Running, seed: int) -> None:
    """Seeds differ, and each gives the same output again."""
    body = {
        "input_ids": IDS,
        "sampling_params": {"temperature": 20.0, "max_new_tokens": 16, "ignore_eos": True},
    }  # fmt: skip
    made = []
    for one in (seed, seed, seed ^ 1):
        body["sampling_params"]["sampling_seed"] = one
        made.append(post(plain, "/generate", body)["output_ids"])
    assert made[0] == made[1] != made[2]
