"""Log-probabilities of clients' texts, each compared with a plain JAX forward pass."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool import EnginePool, InvalidRequest, toy
from enginepool.serve.scoring import _softmax
from enginepool.serve.wire_extras import EchoedPrompts
from tests.support.forced import LOGPROB_TOLERANCE
from tests.support.scores import assert_named, assert_prompt_logprobs, chosen, reference
from tests.support.servers import Running

SUM = "12+7="
IDS = list(SUM.encode())
MODEL = Path(toy.checkpoint())


def post(running: Running, path: str, body: dict[str, Any]) -> Any:
    with running.http() as client:
        reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def rows_of(ids: list[int]) -> np.ndarray:
    """The log-probabilities of the whole vocabulary for every token but the first."""
    return reference(MODEL, [ids[:1]], [ids[1:]])[0]


@pytest.mark.parametrize("start", [0, 3])
def test_generate(plain: Running, start: int) -> None:
    """sglang's names. The values are at temperature 1, and do not change what is generated."""
    body = {
        "input_ids": IDS, "return_logprob": True, "logprob_start_len": start,
        "top_logprobs_num": 2, "sampling_params": {"temperature": 0},
    }  # fmt: skip
    result = post(plain, "/generate", body)
    assert result["text"] == "19"
    meta = result["meta_info"]
    assert_prompt_logprobs(MODEL, IDS, meta)
    assert [entry[2] for entry in meta["input_token_logprobs"]] == list(SUM[start:])
    places = [place for place in meta["input_top_logprobs"] if place is not None]
    for row, place in zip(rows_of(IDS)[max(start - 1, 0) :], places, strict=True):
        assert [token for _, token, _ in place] == row.argsort()[::-1][:2].tolist()
    assert len(meta["output_token_logprobs"]) == 3


def test_generate_without_scores(plain: Running) -> None:
    """sglang's `return_output_logprob_only`: the output's log-probabilities."""
    body = {"text": SUM, "return_output_logprob_only": True, "sampling_params": {"temperature": 0}}
    meta = post(plain, "/generate", body)["meta_info"]
    assert [entry[2] for entry in meta["output_token_logprobs"]] == ["1", "9", "<|im_end|>"]
    assert "input_token_logprobs" not in meta


def test_generate_with_named_ids(plain: Running) -> None:
    """sglang's `token_ids_logprob` for prompt and output, with texts. Null means no log-
    probabilities."""
    named = [*b"19", 258, 5]
    body = {
        "input_ids": IDS, "return_logprob": True, "logprob_start_len": 2,
        "token_ids_logprob": named, "sampling_params": {"temperature": 0, "regex": "[0-9]{2}"},
    }  # fmt: skip
    result = post(plain, "/generate", body)
    assert result["text"] == "19"
    meta = result["meta_info"]
    assert_named(rows_of(IDS)[1:], named, meta["input_token_ids_logprobs"])
    first, *_ = meta["output_token_ids_logprobs"]
    assert [entry[2] for entry in first] == ["1", "9", "<|im_end|>", "\x05"]
    assert [entry[0] for entry in first[2:]] == [None, None]
    assert first[0][0] == pytest.approx(0, abs=0.1)
    body |= {"stream": True, "logprob_start_len": -1}
    with plain.http() as client:
        reply = client.post("/generate", json=body)
    *chunks, done = [line[6:] for line in reply.text.splitlines() if line]
    assert done == "[DONE]"
    last = json.loads(chunks[-1])["meta_info"]
    streamed, whole = (one["output_token_ids_logprobs"] for one in (last, meta))
    for place, other in zip(streamed, whole, strict=True):
        assert [entry[1:] for entry in place] == [entry[1:] for entry in other]
        assert place[0][0] == pytest.approx(other[0][0], abs=LOGPROB_TOLERANCE)
    assert "input_token_ids_logprobs" not in last


def test_nothing_is_generated(plain: Running) -> None:
    """`max_new_tokens` of 0 returns the prompt's values only, for any number of samples."""
    long = (IDS * 101)[:505]
    for ids, n in ((IDS, 1), (IDS, 40), (long, 1), ([65], 3)):
        body = {
            "input_ids": ids, "return_logprob": True, "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 0, "n": n},
        }  # fmt: skip
        made = post(plain, "/generate", body)
        results = made if isinstance(made, list) else [made]
        assert len(results) == n
        for result in results:
            assert (result["text"], result["output_ids"]) == ("", [])
            assert result["meta_info"]["finish_reason"]["type"] == "length"
        assert_prompt_logprobs(MODEL, ids, results[-1]["meta_info"])


LONGEST = 512  # the context of the test pools
NOTHING: dict[str, Any] = {"max_new_tokens": 0}
SCORED = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": NOTHING}


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/generate", "input_ids", SCORED),
        ("/v1/completions", "prompt", {"echo": True, "logprobs": 0, "max_tokens": 0}),
        ("/v1/completions", "prompt", {"prompt_logprobs": 0, "max_tokens": 0}),
        (
            "/inference/v1/generate",
            "token_ids",
            {"sampling_params": {"prompt_logprobs": 0, "max_tokens": 0}},
        ),
    ],
)
def test_the_longest_prompt_that_is_scored(
    plain: Running, sums: EnginePool, path: str, field: str, body: dict[str, Any]
) -> None:
    """The whole context, as in Python. One token more is refused by both, and so is a prompt of
    this length from which something is generated."""
    ids = (IDS * LONGEST)[: LONGEST + 1]
    result: Any = sums.generate(None, NOTHING, input_ids=ids[:LONGEST], return_prompt_logprob=True)
    assert len(result["meta_info"]["input_token_logprobs"]) == LONGEST
    post(plain, path, {**body, field: ids[:LONGEST]})
    with pytest.raises(InvalidRequest, match=f"at most {LONGEST}"):
        sums.generate(None, NOTHING, input_ids=ids, return_prompt_logprob=True)
    with plain.http() as client:
        reply = client.post(path, json={**body, field: ids})
        assert reply.status_code == 400, reply.text
        assert f"at most {LONGEST}" in reply.json()["error"]["message"]
        more = {"sampling_params": {}} if "sampling_params" in body else {"max_tokens": 1}
        reply = client.post(path, json={**body, **more, field: ids[:LONGEST]})
        assert reply.status_code == 400, reply.text
        assert "at most 505" in reply.json()["error"]["message"]


def test_the_longest_text_that_is_scored(plain: Running) -> None:
    """Also in tokens of many characters, and before a label."""
    piece = "<|reserved_10|>"  # no token of the toy has more characters
    text = piece * LONGEST
    meta = post(plain, "/generate", {**SCORED, "text": text})["meta_info"]
    assert len(meta["input_token_logprobs"]) == LONGEST
    body: dict[str, Any] = {"query": piece * (LONGEST - 2), "items": ["1"], "label_token_ids": [49]}
    assert len(post(plain, "/v1/score", body)["scores"]) == 1
    body["query"] *= 2
    with plain.http() as client:
        reply = client.post("/v1/score", json=body)
    assert reply.status_code == 400
    assert f"at most {LONGEST}" in reply.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 8])
def test_echo(plain: Running, tokens: int, stream: bool) -> None:
    """OpenAI's way to a prompt's values: those of prompt and output in one list."""
    body = {
        "model": "toy", "prompt": IDS, "echo": True, "logprobs": 1, "max_tokens": tokens,
        "temperature": 0, "stream": stream,
    }  # fmt: skip
    with plain.http() as client:
        reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    if stream:
        lines = [line[6:] for line in reply.text.splitlines() if line]
        choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    else:
        choices = reply.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == SUM + ("19" if tokens else "")
    values: list[Any] = []
    texts: list[str] = []
    top: list[Any] = []
    for choice in choices:
        values += choice["logprobs"]["token_logprobs"]
        texts += choice["logprobs"]["tokens"]
        top += choice["logprobs"]["top_logprobs"]
    ids = IDS + ([*b"19", 258] if tokens else [])
    assert texts == [*SUM, *(["1", "9", "<|im_end|>"] if tokens else [])]
    assert values[0] is None
    assert top[0] is None
    rows = rows_of(ids)
    assert np.abs(chosen(rows, ids[1:]) - values[1:]).max() < LOGPROB_TOLERANCE
    best = [max(place.values()) for place in top[1:]]
    assert np.abs(rows.max(axis=-1) - best).max() < LOGPROB_TOLERANCE


def test_streamed_echo(plain: Running) -> None:
    """The prompt comes before the first text, and no text is lost, also with many prompts and
    samples."""
    body = {
        "model": "toy", "prompt": [SUM, "1+1="], "n": 2, "echo": True, "temperature": 0,
        "stream": True,
    }  # fmt: skip
    with plain.http() as client:
        reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert texts_of(reply.text) == {0: SUM + "19", 1: SUM + "19", 2: "1+1=2", 3: "1+1=2"}


def texts_of(stream: str) -> dict[int, str]:
    """The text of each output of a stream."""
    texts: dict[int, str] = {}
    for line in stream.splitlines():
        if line and line != "data: [DONE]":
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def test_an_echo_without_text() -> None:
    """An output of special tokens only. Its values are in the first chunk only, as for any
    output."""
    echoed = EchoedPrompts(lambda _: "")
    values = [(None, 258, "")]
    for place in (values, []):
        meta: dict[str, Any] = {"output_token_logprobs": [], "input_token_logprobs": values}
        meta["input_top_logprobs"] = []
        echoed.observe({"index": 0, "text": "", "meta_info": meta})
        assert meta["input_token_logprobs"] == place


def test_echo_with_the_sampled_ones_alone(plain: Running) -> None:
    body = {"model": "toy", "prompt": SUM, "echo": True, "logprobs": 0, "temperature": 0}
    (choice,) = post(plain, "/v1/completions", body)["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == len(SUM) + 3


def test_prompt_logprobs(plain: Running) -> None:
    """vLLM's form: by token id, with the prompt's own token among the most probable. With 0 only
    the prompt's own."""
    completions: dict[str, Any] = {
        "model": "toy", "prompt": [IDS, IDS[:3]], "temperature": 0, "n": 2, "prompt_logprobs": 2,
    }  # fmt: skip
    choices = post(plain, "/v1/completions", completions)["choices"]
    assert [choice["text"] for choice in choices[:2]] == ["19", "19"]
    for choice, ids in zip(choices, [IDS, IDS, IDS[:3], IDS[:3]], strict=True):
        first, *places = choice["prompt_logprobs"]
        assert first is None
        for row, place, token in zip(rows_of(ids), places, ids[1:], strict=True):
            best = row.argsort()[::-1][:2].tolist()
            assert set(place) == {str(token), *map(str, best)}
            for one, value in place.items():
                assert abs(value["logprob"] - row[int(one)]) < LOGPROB_TOLERANCE
                rank = best.index(int(one)) + 1 if int(one) in best else None
                assert value["rank"] == rank
    chat = {
        "model": "toy", "messages": [{"role": "user", "content": SUM}], "temperature": 0,
        "prompt_logprobs": 0, "return_token_ids": True,
    }  # fmt: skip
    made = post(plain, "/v1/chat/completions", chat)
    ids = made["prompt_token_ids"]
    assert [list(place) for place in made["prompt_logprobs"][1:]] == [[str(i)] for i in ids[1:]]


@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("softmax", [False, True])
def test_score(plain: Running, sums: EnginePool, item_first: bool, softmax: bool) -> None:
    """sglang's: the probability of each label after query and item, as texts and as ids."""
    labels = [*b"123", 258]
    texts = {"query": "12+", "items": ["7=", "8=", "30="]}
    ids = {"query": list(b"12+"), "items": [list(item.encode()) for item in texts["items"]]}
    options = {
        "model": "toy", "label_token_ids": labels, "apply_softmax": softmax,
        "item_first": item_first,
    }  # fmt: skip
    scores = []
    for item in ids["items"]:
        prompt = item + ids["query"] if item_first else ids["query"] + item
        (row,) = reference(MODEL, [prompt], [[0]])[0]
        values = np.exp(row[labels])
        scores.append(values / values.sum() if softmax else values)
    for given in (texts, ids):
        before = sums.stats()["finished"]
        made = post(plain, "/v1/score", {**options, **given})
        assert made["object"] == "scoring"
        assert np.abs(np.array(made["scores"]) - scores).max() < 1e-4
        assert sums.stats()["finished"] == before + 3  # a prompt is computed once


def test_score_of_many_labels(plain: Running, sums: EnginePool) -> None:
    """A prompt is computed once for 64 labels, and each label keeps its place."""
    labels = [*range(150), 5]
    body = {"model": "toy", "query": "12+", "items": ["7=", "8="], "label_token_ids": labels}
    before = sums.stats()["finished"]
    scores = np.array(post(plain, "/v1/score", body)["scores"])
    assert sums.stats()["finished"] == before + 2 * 3
    for row, item in zip(scores, (b"7=", b"8="), strict=True):
        (expected,) = reference(MODEL, [list(b"12+" + item)], [[0]])[0]
        assert np.abs(row - np.exp(expected[labels])).max() < 1e-4


def test_score_of_many_ids(plain: Running) -> None:
    """More of them than a body has other values, and each where it was sent."""
    items = [[49 + place % 2] * 300 for place in range(80)]
    body = {"query": IDS, "items": items, "label_token_ids": [49], "item_first": True}
    scores = post(plain, "/v1/score", body)["scores"]
    expected = [np.exp(reference(MODEL, [item + IDS], [[0]])[0][0][49]) for item in items[:2]]
    assert np.array(scores)[:, 0] == pytest.approx(expected * 40, abs=1e-4)


def test_a_reply_has_a_limited_number_of_values(plain: Running) -> None:
    """A reply may have only so many log-probabilities of prompts: each costs time, and every
    sample repeats them."""
    body = {
        "input_ids": IDS * 100, "return_logprob": True, "logprob_start_len": 0,
        "top_logprobs_num": 20, "sampling_params": {"max_new_tokens": 0, "n": 128},
    }  # fmt: skip
    with plain.http() as client:
        reply = client.post("/generate", json=body)
    assert reply.status_code == 400, reply.text
    assert f"{500 * 21 * 128} log-probabilities" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"query": "a", "items": ["b"]}, "label_token_ids"),
        ({"query": "a", "items": [], "label_token_ids": [1]}, "items"),
        ({"query": "a", "items": [[1]], "label_token_ids": [1]}, "must all be texts"),
        ({"items": ["b"], "label_token_ids": [1]}, "must all be texts"),
        ({"query": "a", "items": ["b"], "label_token_ids": [100000]}, "100000"),
        ({"query": "a", "items": ["b"] * 600, "label_token_ids": [1] * 65}, "--max-queued"),
        ({"query": "a", "items": ["b"] * 600, "label_token_ids": [1] * 9000}, "send several"),
        (
            {"query": "a" * 1_000_000, "items": ["b"] * 10, "label_token_ids": [1] * 65},
            "--max-body-bytes",
        ),
        ({"query": "a", "items": ["b" * 600], "label_token_ids": [1]}, "too long"),
        ({"text_1": "a", "text_2": "b"}, "unknown field text_1"),
    ],
)
def test_score_refuses(plain: Running, body: dict[str, Any], part: str) -> None:
    with plain.http() as client:
        reply = client.post("/v1/score", json={"model": "toy", **body})
    assert reply.status_code == 400, reply.text
    assert part in reply.json()["error"]["message"]


def test_softmax_of_many_labels() -> None:
    """In time that grows with their number, because the event loop waits for it."""
    began = time.perf_counter()
    values = _softmax([0.0] * 50_000)
    assert time.perf_counter() - began < 1
    assert values == pytest.approx([1 / 50_000] * 50_000)
