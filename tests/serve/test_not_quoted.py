"""A client's text is neither in the reply that refuses it nor in the log. Only its type is."""

import logging
from typing import Any

import jinja2
import pytest

from enginepool import EnginePool, InvalidRequest
from enginepool.serve.rendering import Rendering
from tests.support.servers import Running

WORDS = "zebra umbrella"
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES, TOKENS, TOKENIZE = "/v1/responses", "/inference/v1/generate", "/tokenize"
TURN: dict[str, Any] = {"role": "user", "content": WORDS}


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": list(messages), **fields}


# What is wrong, and where, as the error says it.
WRONG: list[tuple[str, Any, str]] = [
    (TOKENS, {"token_ids": [49], "model": WORDS}, "sampling_params"),
    (CHAT, chat({"content": WORDS}), "messages[0]"),
    (CHAT, chat(WORDS), "messages[0]"),
    (CHAT, chat({"role": WORDS, "content": "1"}), "role"),
    (CHAT, chat({"role": "user", "content": {"text": WORDS}}), "content"),
    (CHAT, chat({"role": "user", "content": [WORDS]}), "messages[0]"),
    (CHAT, chat({"role": "user", "content": [{"text": WORDS}]}), "messages[0]"),
    (CHAT, chat(TURN | {"note": WORDS}), "messages.0.note"),
    (CHAT, chat(TURN, temperature=WORDS), "temperature"),
    (CHAT, chat(TURN, promt=WORDS), "promt"),
    (CHAT, chat(TURN, tools=WORDS), "tools"),
    (CHAT, chat(TURN, tools=[{"name": WORDS}]), "tools.0.function"),
    (CHAT, chat(TURN, response_format=WORDS), "response_format"),
    (CHAT, chat(TURN, structured_outputs={"regex": WORDS, "grammar": WORDS}), "exactly one"),
    (CHAT, chat(TURN, stop=WORDS * 400), "stop"),
    (CHAT, {"messages": WORDS, "model": "toy"}, "messages"),
    (COMPLETIONS, {"text": WORDS, "model": "toy"}, "text"),
    (COMPLETIONS, {"prompt": {"text": WORDS}, "model": "toy"}, "prompt"),
    (COMPLETIONS, {"prompt": [WORDS, 1], "model": "toy"}, "prompt"),
    (COMPLETIONS, {"prompt": WORDS, "model": "toy", "max_tokens": WORDS}, "max_tokens"),
    (COMPLETIONS, {"prompt": WORDS, "model": "toy", "json_schema": f"[{WORDS!r}]"}, "json_schema"),
    (COMPLETIONS, {"prompt": WORDS, "model": "toy", "json_schema": f'["{WORDS}"]'}, "json_schema"),
    (GENERATE, {"text": {"a": WORDS}}, "text"),
    (GENERATE, {"text": [WORDS, {"a": WORDS}]}, "text"),
    (GENERATE, {"txt": WORDS}, "txt"),
    (GENERATE, {"text": WORDS, "sampling_params": WORDS}, "sampling_params"),
    (GENERATE, {"text": WORDS, "sampling_params": {"prefix": WORDS}}, "prefix"),
    (GENERATE, {"text": WORDS, "sampling_params": {"json_schema": [WORDS]}}, "json_schema"),
    (GENERATE, {"text": WORDS, "sampling_params": {"ebnf": {"a": WORDS}}}, "ebnf"),
    (GENERATE, [WORDS], "the body"),
    (GENERATE, WORDS, "the body"),
    (RESPONSES, {"input": {"a": WORDS}}, "input"),
    (RESPONSES, {"input": [{"role": "user", "text": WORDS}]}, "].0"),
    (RESPONSES, {"input": [{"type": WORDS}]}, "].0"),
    (RESPONSES, {"input": "1", "prompt": {"id": "a", "variables": {"b": WORDS}}}, "prompt"),
    (RESPONSES, {"instructions": WORDS}, "input"),
    (TOKENS, {"token_ids": [WORDS], "sampling_params": {}}, "token_ids.0"),
    (TOKENS, {"token_ids": WORDS, "sampling_params": {}}, "token_ids"),
    (TOKENIZE, {"prompt": {"a": WORDS}}, "prompt"),
    (TOKENIZE, {"prompt": "1", "chat_template_kwargs": {"a": WORDS}}, "chat_template_kwargs"),
    (TOKENIZE, {"messages": [{"content": WORDS}]}, "messages"),
    ("/detokenize", {"tokens": [WORDS]}, "tokens.0"),
    ("/v1/score", {"query": WORDS, "items": [[1]], "label_token_ids": [49]}, "query"),
    ("/v1/score", {"query": {"a": WORDS}, "items": [], "label_token_ids": [49]}, "query"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "part"), WRONG)
def test_a_refusal_names_the_field_and_not_the_value(
    plain: Running, caplog: pytest.LogCaptureFixture, path: str, body: Any, part: str
) -> None:
    with caplog.at_level(logging.DEBUG), plain.http() as client:
        reply = client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert part in reply.json()["error"]["message"]
    logged = " ".join(str(vars(record)) for record in caplog.records if record.name != "httpx")
    assert "enginepool.request" in logged
    for told in (reply.text, logged):
        assert "zebra" not in told


def test_an_unknown_query_parameter(plain: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "enginepool"), plain.http() as client:
        reply = client.post(GENERATE, params={"text": WORDS}, json={})
    assert "unknown field text" in reply.json()["error"]["message"]
    assert "zebra" not in reply.text + str([vars(one) for one in caplog.records])


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (jinja2.TemplateError("roles must alternate"), "roles must alternate"),
        (TypeError('can only concatenate str (not "list") to str'), "can only concatenate"),
        (jinja2.TemplateError(f"what is {WORDS}?"), "TemplateError"),
        (ValueError(f"input_value='{WORDS[:10]}'"), "ValueError"),
    ],
)
def test_what_a_template_raises(
    plain: Running, monkeypatch: pytest.MonkeyPatch, error: Exception, kept: str
) -> None:
    """The template's message is in the reply, unless it repeats a message of the chat."""

    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(Rendering, "apply_chat_template", fails)
    with plain.http() as client:
        reply = client.post(CHAT, json=chat(TURN))
    assert reply.status_code == 400, reply.text
    message = reply.json()["error"]["message"]
    assert message.startswith("this request cannot be turned into a prompt: ")
    assert kept in message
    assert "zebra" not in message


def test_from_python(plain: Running, sums: EnginePool) -> None:
    """A call to the pool itself gets the value in the error, even while a server uses the pool."""
    with pytest.raises(InvalidRequest, match=WORDS):
        sums.generate({"text": WORDS})  # type: ignore[call-overload]
