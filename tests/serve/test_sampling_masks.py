"""The ids that output tokens were sampled from, on the routes that return them."""

from itertools import chain, pairwise
from typing import Any

import pytest

from enginepool import EnginePool
from tests.serve.test_token_wire import IDS, SUM, TURNS, events, post
from tests.support.servers import Running

PARAMS: Any = {"temperature": 1.0, "top_k": 3, "top_p": 0.9, "seed": 7}
POOLS: Any = {"temperature": 1.0, "top_k": 3, "top_p": 0.9, "sampling_seed": 7}
NAMES = ("output_sampling_mask", "output_token_sampling_logprobs")


@pytest.fixture
def expected(sums: EnginePool) -> dict[str, Any]:
    params = POOLS | {"max_new_tokens": 8}
    return sums.generate(input_ids=IDS, sampling_params=params, return_sampling_mask=True)


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    meta = expected["meta_info"]
    bounds, ids = meta[NAMES[0]]["indptr"], meta[NAMES[0]]["ids"]
    rows = [ids[a:b] for a, b in pairwise(bounds)]
    assert got["sampling_mask"] == rows
    assert got[NAMES[1]] == pytest.approx(meta[NAMES[1]], abs=1e-4)


def test_generate(plain: Running, expected: dict[str, Any]) -> None:
    """As in Python, also in a stream. Only on request."""
    params = POOLS | {"max_new_tokens": 8}
    body = {"input_ids": IDS, "sampling_params": params, "return_sampling_mask": True}
    made = post(plain, "/generate", body)
    *_, last = events(plain, "/generate", body)
    for one in (made, last):
        assert one["output_ids"] == expected["output_ids"]
        assert one["meta_info"][NAMES[0]] == expected["meta_info"][NAMES[0]]
    other = post(plain, "/generate", body | {"return_sampling_mask": False})
    assert not set(NAMES) & set(other["meta_info"])


def test_tokens(plain: Running, expected: dict[str, Any]) -> None:
    """vLLM's field. A stream has the new ones."""
    params = PARAMS | {"max_tokens": 8, "return_sampling_mask": True}
    body = {"token_ids": IDS, "sampling_params": params}
    (choice,) = post(plain, "/inference/v1/generate", body)["choices"]
    assert choice["token_ids"] == expected["output_ids"]
    assert_same(choice, expected)
    chunks = [one["choices"][0] for one in events(plain, "/inference/v1/generate", body)]
    parts = {
        name: [*chain.from_iterable(chunk[name] for chunk in chunks)]
        for name in ("sampling_mask", NAMES[1])
    }
    assert_same(parts, expected)


def test_completions(plain: Running, expected: dict[str, Any]) -> None:
    body = PARAMS | {"prompt": SUM, "max_tokens": 8, "n": 2, "return_sampling_mask": True}
    choices = post(plain, "/v1/completions", body)["choices"]
    assert_same(choices[0], expected)
    assert len(choices[1]["sampling_mask"]) > 0
    del body["top_k"], body["top_p"], body["n"]
    (choice,) = post(plain, "/v1/completions", body)["choices"]
    assert set(map(str, choice["sampling_mask"])) == {"None"}


def test_chat(plain: Running) -> None:
    body = PARAMS | {"messages": TURNS, "max_tokens": 8, "return_token_ids": True}
    made = post(plain, "/v1/chat/completions", body | {"return_sampling_mask": True})
    (choice,) = made["choices"]
    rows = choice["sampling_mask"]
    assert len(rows) == len(choice["token_ids"])
    assert all(one in row for one, row in zip(choice["token_ids"], rows, strict=True))
    assert all(value <= 0 for value in choice[NAMES[1]])
    (choice,) = post(plain, "/v1/chat/completions", body)["choices"]
    assert choice.get("sampling_mask") is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": SUM, "stream": True}),
        ("/v1/chat/completions", {"messages": TURNS, "stream": True}),
        ("/v1/responses", {"input": SUM}),
    ],
)
def test_routes_without_masks(plain: Running, path: str, body: dict[str, Any]) -> None:
    """OpenAI's streams, and responses."""
    for name in ("return_sampling_mask", "return_routed_experts"):
        with plain.http() as client:
            reply = client.post(path, json=body | {name: True})
        assert reply.status_code == 400
        assert name in reply.json()["error"]["message"]
