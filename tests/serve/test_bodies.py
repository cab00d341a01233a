"""What bodies are accepted, and how much of them a log keeps."""

import json
import socket
from typing import Any

import httpx
import pytest

from enginepool import EnginePool
from tests.support.liveness import callers, paused, until, waiting
from tests.support.servers import Running, generate, serving

SUM = "12+7="
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
PATHS = [CHAT, COMPLETIONS, GENERATE]


def error(reply: httpx.Response) -> str:
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["type"] == "invalid_request_error"
    return reply.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("content", ["[]", '"x"', "1", "null", "true", "[[1]]", "{", "NaN", ""])
def test_what_is_no_object(plain: Running, path: str, content: str) -> None:
    """A body that is JSON but no object, or no JSON, gets a 400 that says so."""
    headers = {"Content-Type": "application/json"}
    with plain.http() as client:
        message = error(client.post(path, content=content, headers=headers))
    assert "object" in message or "not JSON" in message or "Field required" in message


@pytest.mark.parametrize("path", PATHS)
def test_other_content_types(plain: Running, path: str) -> None:
    """A form, which curl sends without a header, and files get a 400 that names the header."""
    with plain.http() as client:
        for sent in (
            {"data": {"model": "toy", "prompt": SUM}},
            {"files": {"prompt": b"1"}},
            {"content": json.dumps({"text": SUM}), "headers": {"Content-Type": "text/plain"}},
        ):
            options: dict[str, Any] = sent
            message = error(client.post(path, **options))
            assert "Content-Type: application/json" in message


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("said", [{"Origin": "http://a.test"}, {"Sec-Fetch-Site": "cross-site"}])
def test_of_no_type_from_a_page(plain: Running, path: str, said: dict[str, str]) -> None:
    """A browser sends such a body for any site's page without asking the server. From other
    clients it counts as JSON."""
    content = json.dumps({"text": SUM, "sampling_params": {"temperature": 0}}).encode()
    with plain.http() as client:
        assert "Content-Type: application/json" in error(
            client.post(path, content=content, headers=said)
        )
        if path == "/generate":
            assert client.post(path, content=content).json()["text"] == "19"


def test_a_client_that_leaves_before_its_body_has_come(
    plain: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so. It is no error of the server."""
    caplog.set_level("INFO", "enginepool")
    with socket.create_connection(("127.0.0.1", plain.server.port)) as client:
        client.sendall(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99\r\n\r\n{"
        )
        with plain.http() as other:  # the server has read it when it has answered another client
            assert other.get("/health").status_code == 200
    until(lambda: bool(caplog.records))
    (line,) = (vars(record) for record in caplog.records)
    assert (line["msg"], line["outcome"]) == ("enginepool.request", "disconnected")


def test_methods_that_a_route_does_not_have(plain: Running) -> None:
    with plain.http() as client:
        for path, method in {"/generate": "POST", "/health": "GET"}.items():
            reply = client.delete(path)
            assert (reply.status_code, reply.headers["allow"]) == (405, method)


def test_ids_are_what_was_sent(plain: Running) -> None:
    """One prompt of ids, several, in OpenAI's and in sglang's form, with echo."""
    ids, other = list(SUM.encode()), list(b"30+4=")
    client = plain.openai()
    made = client.completions.create(model="toy", prompt=ids, temperature=0, echo=True)
    assert made.choices[0].text == "12+7=19"
    made = client.completions.create(model="toy", prompt=[ids, other], temperature=0, echo=True)
    assert [choice.text for choice in made.choices] == ["12+7=19", "30+4=34"]
    with plain.http() as http:
        body = {"input_ids": [ids, other], "sampling_params": {"temperature": 0}}
        assert [one["text"] for one in http.post(GENERATE, json=body).json()] == ["19", "34"]
        message = error(http.post(GENERATE, json={"input_ids": [ids, [1] * 506]}))
        assert "506 tokens" in message
        assert "at most 505" in message


@pytest.mark.parametrize("rid", ["x" * 257, "", ["a", "a"], ["a", ""]])
def test_rids_that_cannot_be(plain: Running, rid: Any) -> None:
    """Too long, empty, or twice in one body."""
    prompts = [SUM] * len(rid) if isinstance(rid, list) else SUM
    with plain.http() as client:
        assert "rid" in error(client.post(GENERATE, json={"text": prompts, "rid": rid}))
        body = {"model": "toy", "prompt": prompts, "rid": rid}
        assert "rid" in error(client.post(COMPLETIONS, json=body))


def test_a_rid_in_flight(one_sum: EnginePool) -> None:
    """Any route refuses it until the first request has ended. After that it is accepted."""
    with serving(one_sum) as running, running.http() as client, callers() as threads:
        body = {"text": SUM, "rid": "mine", "sampling_params": {"temperature": 0}}
        with paused(one_sum):
            first = threads.submit(client.post, GENERATE, json=body)
            until(lambda: waiting(one_sum))
            assert "'mine'" in error(client.post(GENERATE, json=body))
            other = {"model": "toy", "prompt": SUM, "rid": "mine"}
            assert "'mine'" in error(client.post(COMPLETIONS, json=other))
        assert first.result().json()["text"] == "19"
        for _ in range(2):
            assert client.post(GENERATE, json=body).json()["meta_info"]["id"] == "mine"


def test_log_lines_are_short(sums: EnginePool, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a client sends: many and long ids, long prompts, a long path."""
    rids = [f"{number:03}" + "r" * 250 for number in range(300)]
    bodies: list[dict[str, Any]] = [
        {"text": [SUM] * 300, "rid": rids, "sampling_params": {"max_new_tokens": 1}},
        {"input_ids": [[49] * 400] * 300, "sampling_params": {"max_new_tokens": 1}},
        {"text": ["1" * 400] * 300, "sampling_params": {"max_new_tokens": 1}},
        {"text": SUM, "rid": "s" * 300},
    ]
    with caplog.at_level("INFO", "enginepool"):
        with serving(sums, log_prompts=True) as running, running.http() as client:
            statuses = [client.post(GENERATE, json=body).status_code for body in bodies]
            assert client.get("/" + "p" * 20_000).status_code == 404
        lines = [vars(r) for r in caplog.records if r.msg == "enginepool.request"]
    assert statuses == [200, 200, 200, 400]
    assert len(lines) == 5
    first = lines[0]
    assert first["ids"][0].startswith("000r")
    assert first["prompt_tokens"] == 1500  # figures count everything
    assert all(len(repr(line)) < 20_000 for line in lines)
    assert len(lines[-1]["path"]) < 1000
    names = ("path", "ids", "prompts", "error")
    assert max(len(json.dumps({n: line.get(n) for n in names})) for line in lines) < 12_000


def test_requests_of_one_call(one_sum: EnginePool) -> None:
    """Prompts times samples: a call that could never wait together is refused, and the error
    names the option."""
    with serving(one_sum) as running, running.http() as client:
        for body in (
            {"text": [SUM] * 3},
            {"text": SUM, "sampling_params": {"n": 3}},
            {"text": [SUM] * 2, "sampling_params": [{"n": 1}, {"n": 2}]},
            {"input_ids": [[49]] * 3, "stream": True},
        ):
            message = error(client.post(GENERATE, json=body))
            assert "3 requests" in message
            assert "at most 2" in message
            assert "--max-queued-requests" in message
        body = {"model": "toy", "prompt": [SUM] * 2, "n": 2}
        assert "4 requests" in error(client.post(COMPLETIONS, json=body))
        body = {"model": "toy", "messages": [{"role": "user", "content": SUM}], "n": 3}
        assert "3 requests" in error(client.post(CHAT, json=body))
        assert generate(client, SUM)["text"] == "19"
