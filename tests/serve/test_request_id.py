"""`x-request-id` connects a reply with its log line."""

import logging
from typing import Any

import pytest

from tests.support.liveness import until
from tests.support.servers import Running

SUM: dict[str, Any] = {"text": "12+7=", "sampling_params": {"temperature": 0}}


def lines(caplog: pytest.LogCaptureFixture, one: str) -> list[logging.LogRecord]:
    return [r for r in caplog.records if getattr(r, "request_id", None) == one]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/generate", SUM, 200),
        ("/generate", SUM | {"stream": True}, 200),
        ("/generate", {"text": ""}, 400),
        ("/nowhere", {}, 404),
    ],
    ids=["whole", "stream", "refused", "nowhere"],
)
def test_a_clients_own(
    plain: Running, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any], status: int
) -> None:
    """It is in the reply, whatever the reply is, and in the request's log line."""
    caplog.set_level("INFO", "enginepool")
    with plain.http() as client:
        reply = client.post(path, json=body, headers={"x-request-id": "of-a-client/1"})
    assert reply.status_code == status
    assert reply.headers.get_list("x-request-id") == ["of-a-client/1"]
    until(lambda: lines(caplog, "of-a-client/1"))
    (line,) = lines(caplog, "of-a-client/1")
    assert (line.msg, vars(line)["path"]) == ("enginepool.request", path)


@pytest.mark.parametrize("given", [None, "", "two words", "x" * 129, "ä".encode()])
def test_one_of_its_own(
    plain: Running, caplog: pytest.LogCaptureFixture, given: str | bytes | None
) -> None:
    """If a client sends none, or one that is not safe in a log, the server makes one."""
    caplog.set_level("INFO", "enginepool")
    headers: Any = {} if given is None else {"x-request-id": given}
    with plain.http() as client:
        made = [
            client.post("/generate", json=SUM, headers=headers).headers["x-request-id"]
            for _ in range(2)
        ]
    assert len(set(made)) == 2
    for one in made:
        assert len(one) == 32
        assert len(lines(caplog, one)) == 1


def test_the_openai_package_has_it(plain: Running) -> None:
    reply = plain.openai().chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "12+7="}]
    )
    assert reply._request_id is not None
    assert len(reply._request_id) == 32
