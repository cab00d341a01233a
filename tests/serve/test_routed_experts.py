"""The experts of each token, on the routes that return them."""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from enginepool import EnginePool
from tests.support.experts import (
    OPTIONS,
    PROMPTS,
    SAMPLED,
    assert_experts,
    assert_rows,
    expected,
    write_mixture,
)
from tests.support.servers import serving

WIRE: dict[str, Any] = {"temperature": 1.0, "seed": 3, "ignore_eos": True, "max_tokens": 9}
ASKED = {"return_routed_experts": True}
CHAT: dict[str, Any] = WIRE | {"messages": [{"role": "user", "content": "1+2="}]}
TEXT: dict[str, Any] = WIRE | {"prompt": PROMPTS[4]}
IDS_OUT = {"return_token_ids": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("moe"), 1)


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[httpx.Client]:
    with (
        EnginePool(str(model), devices=1, **OPTIONS) as pool,
        serving(pool) as running,
        running.http() as client,
    ):
        yield client


def answer(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_generate(client: httpx.Client, model: Path) -> None:
    """sglang's field. A stream has it at the end."""
    body: dict[str, Any] = {"input_ids": PROMPTS[0], "sampling_params": SAMPLED} | ASKED
    made = answer(client, "/generate", body)
    lines = client.post("/generate", json=body | {"stream": True}).text.splitlines()
    assert_rows(model, PROMPTS[0], made)
    *chunks, done = [line[6:] for line in lines if line]
    assert done == "[DONE]"
    assert [("routed_experts" in json.loads(chunk)["meta_info"]) for chunk in chunks] == [
        *[False] * (len(chunks) - 1), True,
    ]  # fmt: skip


def assert_file(choice: Any, model: Path, prompt: list[int], start: int = 0) -> None:
    """vLLM's form: a `.npy` file."""
    rows = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    assert rows.dtype == np.int32
    assert_experts(rows, expected(model, [*prompt, *choice["token_ids"]][:-1])[start:])


def test_completions(client: httpx.Client, model: Path) -> None:
    """For each sample, all rows or those from a position of the prompt on."""
    made = answer(client, "/v1/completions", TEXT | ASKED | IDS_OUT | {"n": 2})
    for choice in made["choices"]:
        assert_file(choice, model, PROMPTS[4])
    for start, first in ((60, 60), (99, 70)):  # a later start counts as the prompt's end
        body = TEXT | ASKED | IDS_OUT | {"routed_experts_prompt_start": start}
        (choice,) = answer(client, "/v1/completions", body)["choices"]
        assert_file(choice, model, PROMPTS[4], first)
    (choice,) = answer(client, "/v1/completions", TEXT)["choices"]
    assert choice["routed_experts"] is None


def test_chats(client: httpx.Client, model: Path) -> None:
    made = answer(client, "/v1/chat/completions", CHAT | ASKED | IDS_OUT)
    assert_file(made["choices"][0], model, made["prompt_token_ids"])
    made = answer(client, "/v1/chat/completions", CHAT)
    assert made["choices"][0].get("routed_experts") is None


def test_token_ids(client: httpx.Client, model: Path) -> None:
    """In a stream the last chunk of each output has them."""
    params = WIRE | ASKED | {"n": 2, "routed_experts_prompt_start": 5}
    body: dict[str, Any] = {"token_ids": PROMPTS[2], "sampling_params": params}
    made = answer(client, "/inference/v1/generate", body)["choices"]
    for choice in made:
        assert_file(choice, model, PROMPTS[2], 5)
    lines = client.post("/inference/v1/generate", json=body | {"stream": True}).text.splitlines()
    *chunks, _ = [line[6:] for line in lines if line]
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    last = [choice for choice in choices if choice["finish_reason"]]
    assert [one["routed_experts"] for one in sorted(last, key=lambda one: one["index"])] == [
        one["routed_experts"] for one in made
    ]
    assert all(one["routed_experts"] is None for one in choices if not one["finish_reason"])


def test_not_on_the_wire(client: httpx.Client, keep_pool: Any) -> None:
    """OpenAI's streams have none, and neither has a pool that does not record them."""
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        reply = client.post(path, json=body | ASKED | {"stream": True})
        assert reply.status_code == 400
        assert "return_routed_experts" in reply.json()["error"]["message"]
    with serving(keep_pool("qwen3", 4)) as running, running.http() as other:
        replies = [
            other.post("/v1/completions", json=TEXT | ASKED),
            other.post("/v1/chat/completions", json=CHAT | ASKED),
            other.post(
                "/inference/v1/generate", json={"token_ids": [5], "sampling_params": WIRE | ASKED}
            ),
        ]
    for reply in replies:
        assert reply.status_code == 400
        assert "enable_return_routed_experts=True" in reply.json()["error"]["message"]
