"""The `openai` package against a running server."""

import json
import math
import threading
from typing import Any

import openai
import pytest
from tokenizers.processors import TemplateProcessing

from enginepool import EnginePool
from enginepool.toy.files import START_ID, START_TOKEN
from tests.support.liveness import callers, paused, until, waiting
from tests.support.servers import Running, serving
from tests.support.templates import TEMPLATES, rendered

SUM = "12+7="
CHAT: Any = [{"role": "user", "content": SUM}]


def test_completions(plain: Running) -> None:
    """One prompt and several, greedy and truncated, with usage."""
    client = plain.openai()
    made = client.completions.create(model="toy", prompt=[SUM, "30+4="], temperature=0)
    assert [choice.text for choice in made.choices] == ["19", "34"]
    assert [choice.finish_reason for choice in made.choices] == ["stop", "stop"]
    assert [choice.index for choice in made.choices] == [0, 1]
    assert made.usage is not None
    assert made.usage.prompt_tokens == 10
    assert made.usage.completion_tokens == 6  # including end tokens
    echoed = client.completions.create(model="toy", prompt=SUM, temperature=0, echo=True)
    assert echoed.choices[0].text == "12+7=19"


def test_token_ids(plain: Running) -> None:
    made = plain.openai().completions.create(model="toy", prompt=list(SUM.encode()), temperature=0)
    assert made.choices[0].text == "19"


def test_chat(plain: Running) -> None:
    made = plain.openai().chat.completions.create(model="toy", messages=CHAT, temperature=0)
    assert made.choices[0].message.content == "19"
    assert made.choices[0].message.role == "assistant"
    assert made.choices[0].finish_reason == "stop"
    assert made.id.startswith("chatcmpl-")


def test_streaming(plain: Running) -> None:
    """The pieces make up the answer. There is one id and one role, and the usage at the end on
    request."""
    client = plain.openai()
    chunks = list(
        client.chat.completions.create(
            model="toy",
            messages=CHAT,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "19"
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3
    pieces = client.completions.create(
        model="toy", prompt=[SUM, "30+4="], temperature=0, stream=True, logprobs=2
    )
    texts, tokens = ["", ""], ["", ""]
    for piece in pieces:
        choice = piece.choices[0]
        texts[choice.index] += choice.text
        assert choice.logprobs is not None
        tokens[choice.index] += "".join(choice.logprobs.tokens or [])
    assert texts == ["19", "34"]
    assert tokens == ["19<|im_end|>", "34<|im_end|>"]


def test_n(plain: Running) -> None:
    """Four samples. With a seed they are the same four again."""
    client = plain.openai()
    options: dict[str, Any] = {
        "model": "toy", "messages": CHAT, "n": 4, "temperature": 20.0, "max_tokens": 16, "seed": 5,
    }  # fmt: skip
    one, other = (client.chat.completions.create(**options) for _ in range(2))
    texts = [choice.message.content for choice in one.choices]
    assert texts == [choice.message.content for choice in other.choices]
    assert len(set(texts)) > 1
    assert [choice.index for choice in one.choices] == [0, 1, 2, 3]
    different = client.chat.completions.create(**{**options, "seed": 6})
    assert texts != [choice.message.content for choice in different.choices]
    assert one.usage is not None
    assert one.usage.prompt_tokens == 24


def test_logprobs(plain: Running) -> None:
    """One entry an output token. The sampled token is the first of the most probable."""
    client = plain.openai()
    options: dict[str, Any] = {
        "model": "toy", "messages": CHAT, "temperature": 0, "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    made = client.chat.completions.create(**options)
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    content = logprobs.content or []
    assert [entry.token for entry in content] == ["1", "9", "<|im_end|>"]
    for entry in content:
        assert -0.5 < entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert math.isclose(entry.top_logprobs[0].logprob, entry.logprob, abs_tol=1e-5)


def test_logprobs_in_a_stream(one_sum: EnginePool) -> None:
    """Each token has its own, also if a chunk has two tokens."""
    with serving(one_sum) as running:
        chunks = running.openai().chat.completions.create(
            model="toy",
            messages=CHAT,
            temperature=0,
            logprobs=True,
            top_logprobs=3,
            stream=True,
            stream_options={"include_usage": True},
        )
        sizes, content = [], []
        for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content and chunk.choices[0].logprobs:
                sizes.append(len(chunk.choices[0].logprobs.content or []))
                content += chunk.choices[0].logprobs.content or []
    assert sizes[0] == 2
    assert [entry.token for entry in content][:2] == ["1", "9"]
    for entry in content:
        assert entry.top_logprobs[0].token == entry.token
        assert math.isclose(entry.top_logprobs[0].logprob, entry.logprob, abs_tol=1e-5)


@pytest.mark.parametrize("kind", ["Chat", "Completion"])
def test_large_replies_are_made_beside_the_loop(
    plain: Running, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream makes an object for each of many log-probabilities. This runs beside the event
    loop, which serves everybody."""
    from enginepool.serve import openai_serving

    serving, made = getattr(openai_serving, kind), []
    build = serving._build

    def noting(*args: Any) -> Any:
        made.append(threading.current_thread().name)
        return build(*args)

    monkeypatch.setattr(serving, "_build", noting)
    path, said = {
        "Chat": ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 20}),
        "Completion": ("/v1/completions", {"prompt": SUM, "logprobs": 20}),
    }[kind]
    for n in (1, 8):
        body = {"model": "toy", "max_tokens": 20, "ignore_eos": True, "n": n, **said}
        with plain.http() as client:
            reply = client.post(path, json=body)
        assert reply.status_code == 200, reply.text
    few, many = made
    assert few == "server"
    assert many != "server"


def test_stop(plain: Running) -> None:
    made = plain.openai().completions.create(model="toy", prompt=SUM, temperature=0, stop="9")
    assert made.choices[0].text == "1"
    assert made.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"max_tokens": 5000}, ["5000", "context_length=512"]),
        ({"temperature": -1}, ["temperature=-1", "0 (greedy) or more"]),
        ({"n": 129}, ["n=129", "128"]),
        ({"n": 0}, ["n=0", "1 or more"]),
        ({"top_p": 1.5}, ["top_p=1.5", "at most 1"]),
        ({"logprobs": 21}, ["21", "20"]),
        ({"prompt": "1" * 600}, ["600 tokens", "at most 505"]),
        ({"prompt": []}, ["prompt"]),
        ({"prompt": [["+"]]}, ["prompt.list[str].0=<list of 1 entries>"]),
        ({"prompt": [1 << 40]}, [str(1 << 40), "vocabulary of 272"]),
        ({"prompt": ["1"] * 1025}, ["1025", "1024"]),
        ({"max_tokens": 0}, ["max_tokens=0", "echo"]),
        ({"best_of": 3}, ["best_of=3"]),
        ({"suffix": "x"}, ["suffix"]),
        ({"logit_bias": {"5": 1.0}}, ["logit_bias"]),
        ({"seed": 1 << 63}, [str(1 << 63), "64 bits"]),
        ({"extra_body": {"regex": "("}}, ["regex=<str of 1 characters>", "does not compile"]),
        ({"extra_body": {"rid": ["a", "b"]}}, ["2 ids for 1 prompts"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests(
    plain: Running, options: dict[str, Any], parts: list[str], stream: bool
) -> None:
    """A BadRequestError names the value and the limit, also for a stream."""
    with pytest.raises(openai.BadRequestError) as caught:
        plain.openai().completions.create(
            **{"model": "toy", "prompt": SUM, "stream": stream, **options}
        )
    for part in parts:
        assert part in str(caught.value)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
        [{"role": "nobody", "content": "x"}],
        [{"role": "user"}],
        "12+7=",
    ],
)
def test_bad_messages(plain: Running, messages: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        plain.openai().chat.completions.create(model="toy", messages=messages)


def test_rate_limit(one_sum: EnginePool) -> None:
    """A request without room in the queue gets a RateLimitError that says when to try again.
    Waiting requests are answered."""
    with serving(one_sum) as running, callers() as threads:
        client = running.openai()
        with paused(one_sum):
            early = threads.submit(
                client.completions.create, model="toy", prompt=[SUM] * 2, temperature=0
            )
            until(lambda: waiting(one_sum) == 2)
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model="toy", prompt=SUM)
        assert "max_queued=2" in str(caught.value)
        assert caught.value.response.headers["retry-after"] == "1"
        assert [choice.text for choice in early.result().choices] == ["19"] * 2


def test_api_key(sums: EnginePool) -> None:
    with serving(sums, api_key="secret") as running:
        for wrong in ("wrong", "secrets"):
            with pytest.raises(openai.AuthenticationError, match="wrong API key"):
                running.openai(wrong).models.list()
        for header in (b"Bearer ge\xe4", b"Bearer", b"Basic secret", b"secret"):
            reply = running.http(headers={b"Authorization": header}).get("/v1/models")
            assert reply.status_code == 401
        assert running.openai("secret").models.list().data[0].id
        assert running.http().post("/v1/completions", content=b"{").status_code == 401
        for path in ("/", "/health", "/ready", "/metrics"):
            assert running.http().get(path).status_code == 200
        for path in ("/status", "/get_load", "/openapi.json", "/nowhere"):
            assert running.http().get(path).status_code == 401


def test_models(plain: Running) -> None:
    client = plain.openai()
    (card,) = client.models.list().data
    assert client.models.retrieve(card.id).id == card.id
    # The most tokens of prompt and output together. One more does not fit.
    length: Any = card.model_dump()["max_model_len"]
    made = client.completions.create(
        model="toy", prompt=SUM, max_tokens=length - 5, extra_body={"ignore_eos": True}
    )
    assert made.usage is not None
    assert made.usage.total_tokens == length
    with pytest.raises(openai.BadRequestError, match="does not fit"):
        client.completions.create(model="toy", prompt=SUM, max_tokens=length - 4)
    with pytest.raises(openai.NotFoundError, match="'other' is not served"):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": SUM}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/responses", {"input": SUM}),
        ("/v1/score", {"query": SUM, "items": [""], "label_token_ids": [49]}),
    ],
)
def test_a_reply_names_the_model(plain: Running, path: str, body: dict[str, Any]) -> None:
    """A request that names none gets the model that is served."""
    (card,) = plain.openai().models.list().data
    with plain.http() as client:
        assert client.post(path, json=body).json()["model"] == card.id
        if path not in ("/v1/score",):
            lines = client.post(path, json=body | {"stream": True}).text.splitlines()
            chunk = json.loads(next(line for line in lines if line.startswith("data: "))[6:])
            assert chunk.get("response", chunk)["model"] == card.id


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_only_the_context_limits_an_answer(plain: Running, path: str) -> None:
    """Without a limit of its own, as in OpenAI's server."""
    said = {"input": SUM} if path == "/v1/responses" else {"messages": CHAT}
    with plain.http() as client:
        longest = client.get("/v1/models").json()["data"][0]["max_model_len"]
        reply = client.post(path, json={"ignore_eos": True, **said}).json()
    assert reply["usage"]["total_tokens"] == longest


def test_abort_shows_in_the_reply(one_sum: EnginePool) -> None:
    """A request that takes longer than the server allows gets a 504, or in a stream the finish
    reason."""
    with serving(one_sum, request_timeout=1) as running:
        options: dict[str, Any] = {
            "model": "toy", "prompt": SUM, "max_tokens": 500, "extra_body": {"ignore_eos": True},
        }  # fmt: skip
        with paused(one_sum), pytest.raises(openai.APIStatusError, match=r"timeout=1") as caught:
            running.openai().completions.create(**options)
        assert caught.value.status_code == 504
        assert caught.value.response.headers["x-should-retry"] == "false"
        with running.http().stream(
            "POST",
            "/v1/completions",
            json={"model": "toy", "prompt": SUM, "max_tokens": 500, "stream": True,
                  "ignore_eos": True},
        ) as reply:  # fmt: skip
            lines = (line for line in reply.iter_lines() if line.startswith("data: {"))
            first = json.loads(next(lines)[6:])
            with paused(one_sum):
                *_, last, error = [json.loads(line[6:]) for line in lines]
        assert first["choices"][0]["finish_reason"] is None
        assert last["choices"][0]["finish_reason"] == "abort"
        assert error["error"]["type"] == error["error"]["code"] == "timeout"


@pytest.mark.parametrize("template", TEMPLATES)
def test_text_parts(one_sum: EnginePool, template: str) -> None:
    """Content in parts makes the same prompt as the string, for every template."""
    tokenizer = one_sum.engines[0].tokenizer_manager.tokenizer
    own, tokenizer.chat_template = tokenizer.chat_template, TEMPLATES[template]
    try:
        with serving(one_sum) as running:
            made = [
                running.openai().chat.completions.create(
                    model="toy",
                    messages=[{"role": "user", "content": content}],
                    temperature=0,
                )
                for content in (SUM, [{"type": "text", "text": SUM}])
            ]
    finally:
        tokenizer.chat_template = own
    assert [one.choices[0].message.content for one in made] == ["19", "19"]
    tokens = [one.usage.prompt_tokens for one in made if one.usage]
    assert tokens == [len(tokenizer(rendered(("user", SUM)))["input_ids"])] * 2


def test_an_answer_is_continued(plain: Running) -> None:
    """From a string or from text parts."""
    made = []
    for begun in ("1", [{"type": "text", "text": "1"}]):
        turns = [*CHAT, {"role": "assistant", "content": begun}]
        body = {"messages": turns, "continue_final_message": True, "temperature": 0}
        with plain.http() as client:
            reply = client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        made.append(reply.json())
    assert [one["choices"][0]["message"]["content"] for one in made] == ["9", "9"]
    assert made[0]["usage"] == made[1]["usage"]


def test_calls_without_content(plain: Running) -> None:
    """LiteLLM sends an assistant's turn back like this."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns: Any = [
        *CHAT,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "19"},
    ]
    with plain.http() as client:
        body = {"model": "toy", "messages": turns, "max_tokens": 3}
        reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text


def test_other_parts(plain: Running) -> None:
    image: Any = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(openai.BadRequestError, match=r"takes text only.*'image_url'"):
        plain.openai().chat.completions.create(
            model="toy", messages=[{"role": "user", "content": [image]}]
        )


def test_a_rendered_prompt_begins_once(sums: EnginePool, plain: Running) -> None:
    """A text that has its special tokens already is completed without the tokenizer's. Nothing
    is added to token ids."""
    hf: Any = sums.engines[0].tokenizer_manager.tokenizer
    backend = hf.backend_tokenizer
    before = backend.post_processor
    backend.post_processor = TemplateProcessing(
        single=f"{START_TOKEN} $A", special_tokens=[(START_TOKEN, START_ID)]
    )
    try:
        for prompt, special, ids in (
            ("1", True, [START_ID, ord("1")]),
            (f"{START_TOKEN}1", False, [START_ID, ord("1")]),
            (["1", "2"], False, [ord("1")]),
            ([ord("1")], False, [ord("1")]),
        ):
            body = {"prompt": prompt, "add_special_tokens": special, "return_token_ids": True}
            with plain.http() as client:
                reply = client.post("/v1/completions", json=body | {"max_tokens": 1})
            assert reply.status_code == 200, reply.text
            assert reply.json()["choices"][0]["prompt_token_ids"] == ids
    finally:
        backend.post_processor = before
