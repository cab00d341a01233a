"""An output cut by a drain, an abort or a timeout is no success, neither for its client nor in
the counts."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from enginepool import EnginePool
from tests.serve.test_command import FEW_PROGRAMS, process
from tests.serve.test_native import samples
from tests.support.faults import raise_in_step
from tests.support.liveness import SECONDS, callers, paused, running, until, waiting
from tests.support.pools import MakePool
from tests.support.servers import Running, generate, serving

SUM = "12+7="
LONG = {"max_new_tokens": 490, "ignore_eos": True}
OPENAI: dict[str, Any] = {"model": "toy", "max_tokens": 480, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": SUM, "sampling_params": LONG},
    "/v1/completions": {**OPENAI, "prompt": SUM},
    "/v1/chat/completions": {**OPENAI, "messages": [{"role": "user", "content": SUM}]},
    "/inference/v1/generate": {
        "token_ids": list(SUM.encode()),
        "sampling_params": {"max_tokens": 480, "ignore_eos": True},
    },
}
RESPONSES = {"model": "toy", "input": SUM, "max_output_tokens": 480, "ignore_eos": True}
OUTCOMES = {"drain": "draining", "abort": "aborted", "timeout": "timeout"}


def outcomes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [vars(r)["outcome"] for r in caplog.records if r.msg == "enginepool.request"]


@pytest.fixture(scope="module")
def servers(one_sum: EnginePool) -> Iterator[dict[str, Running]]:
    """Servers that keep running after such a cut."""
    with (
        serving(one_sum, enable_admin=True) as abort,
        serving(one_sum, request_timeout=0.5) as timeout,
    ):
        yield {"abort": abort, "timeout": timeout}


@contextmanager
def server(pool: EnginePool, how: str, servers: dict[str, Running]) -> Iterator[Running]:
    if how != "drain":
        yield servers[how]
        return
    with serving(pool, drain_timeout=0.1) as one:
        yield one


def logged(caplog: pytest.LogCaptureFixture, how: str) -> None:
    """The log has the cut output, and no success."""
    until(lambda: OUTCOMES[how] in outcomes(caplog))
    assert "ok" not in outcomes(caplog)


def cut(how: str, server: Running) -> None:
    if how == "drain":
        server.server.stop()
    elif how == "abort":
        server.http().post("/abort_request", json={"abort_all": True})


@pytest.mark.parametrize("how", OUTCOMES)
@pytest.mark.parametrize("path", BODIES)
def test_streams(
    one_sum: EnginePool,
    servers: dict[str, Running],
    caplog: pytest.LogCaptureFixture,
    path: str,
    how: str,
) -> None:
    """They have the tokens so far, the finish reason "abort", and an error before [DONE]."""
    caplog.set_level("INFO", "enginepool")
    with server(one_sum, how, servers) as one, one.http() as client:
        body = BODIES[path] | {"stream": True}
        with client.stream("POST", path, json=body) as reply:
            lines = (line for line in reply.iter_lines() if line)
            first = next(lines)
            with paused(one_sum):
                cut(how, one)
                rest = [first, *lines]
        if how != "drain":
            until(lambda: samples(client).get(("http_requests_total", OUTCOMES[how], path)))
            assert ("http_requests_total", "ok", path) not in samples(client)
    assert rest[-1] == "data: [DONE]"
    error = json.loads(rest[-2][6:])["error"]
    assert error["code"] == OUTCOMES[how]
    assert error["message"]
    assert '"abort"' in rest[-3]
    logged(caplog, how)


@pytest.mark.parametrize("how", OUTCOMES)
def test_by_the_openai_package(one_sum: EnginePool, servers: dict[str, Running], how: str) -> None:
    """Its stream raises."""
    with server(one_sum, how, servers) as one:
        chunks = one.openai().chat.completions.create(
            model="toy", messages=[{"role": "user", "content": SUM}], stream=True, max_tokens=480,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(chunks)
        with paused(one_sum):
            cut(how, one)
            with pytest.raises(openai.APIError) as caught:
                list(chunks)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["code"] == OUTCOMES[how]


@pytest.mark.parametrize("how", OUTCOMES)
def test_streamed_responses(
    one_sum: EnginePool, servers: dict[str, Running], caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """The last event is `response.failed`, and OpenAI's client raises the reason."""
    caplog.set_level("INFO", "enginepool")
    with server(one_sum, how, servers) as one:
        events = one.openai().responses.create(
            model="toy", input=SUM, stream=True, max_output_tokens=480,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        while next(events).type != "response.output_text.delta":
            pass
        with paused(one_sum):
            cut(how, one)
            last: Any = None
            with pytest.raises(openai.APIError) as caught:
                for last in events:  # noqa: B007
                    pass
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["code"] == OUTCOMES[how]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error.message
    logged(caplog, how)


@pytest.mark.parametrize(("how", "status"), [("drain", 503), ("abort", 503), ("timeout", 504)])
def test_scores(
    one_sum: EnginePool,
    servers: dict[str, Running],
    caplog: pytest.LogCaptureFixture,
    how: str,
    status: int,
) -> None:
    """A part of the scores is no answer."""
    caplog.set_level("INFO", "enginepool")
    body = {"query": SUM, "items": [""], "label_token_ids": [49]}
    with (
        server(one_sum, how, servers) as one,
        one.http() as client,
        callers() as threads,
        paused(one_sum),
    ):
        sent = threads.submit(client.post, "/v1/score", json=body)
        until(lambda: waiting(one_sum) or sent.done())
        cut(how, one)
        reply = sent.result()
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["message"]
    until(lambda: outcomes(caplog))
    assert outcomes(caplog) == [OUTCOMES[how]]


@pytest.mark.parametrize(("how", "status"), [("drain", 503), ("abort", 200), ("timeout", 504)])
@pytest.mark.parametrize("path", [*BODIES, "/v1/responses"])
def test_replies(
    one_sum: EnginePool,
    servers: dict[str, Running],
    caplog: pytest.LogCaptureFixture,
    path: str,
    how: str,
    status: int,
) -> None:
    """An error. If an administrator aborted the request, upstream's reply says so, and not "ok"."""
    caplog.set_level("INFO", "enginepool")
    with server(one_sum, how, servers) as one, one.http() as client, callers() as threads:
        sent = threads.submit(client.post, path, json={**BODIES, "/v1/responses": RESPONSES}[path])
        until(lambda: running(one_sum))
        with paused(one_sum):
            cut(how, one)
            reply = sent.result()
    assert reply.status_code == status, reply.text
    if status == 200:
        assert '"abort"' in reply.text or reply.json()["status"] == "cancelled"
    else:
        assert reply.json()["error"]["code"] == OUTCOMES[how]
    assert ("retry-after" in reply.headers) == (how == "drain")
    logged(caplog, how)


def test_no_engine_is_left(make_pool: MakePool) -> None:
    """A stream without a token gets the status that a reply without a stream gets."""
    pool = make_pool("toy", 1, restart=False)
    bodies = {**BODIES, "/v1/responses": RESPONSES}
    with serving(pool) as one, one.http() as client, callers(2 * len(bodies)) as threads:
        with paused(pool):
            sent = [
                threads.submit(client.post, path, json=body | {"stream": stream})
                for path, body in bodies.items()
                for stream in (False, True)
            ]
            until(lambda: waiting(pool) == len(sent))
            raise_in_step(pool, 0)
        replies = [one.result() for one in sent]
    for reply in replies:
        assert reply.status_code == 503, reply.text
        assert reply.json()["error"]["code"] == "no_engine"
        assert reply.headers["retry-after"] == "10"


def test_a_request_that_never_ran_counts_no_tokens(
    one_sum: EnginePool, caplog: pytest.LogCaptureFixture
) -> None:
    """It was aborted while it waited. The metrics, the log and the pool's own figures count no
    tokens."""
    before = one_sum.stats()["prompt_tokens"]
    caplog.set_level("INFO", "enginepool")
    with serving(one_sum, enable_admin=True) as one, one.http() as client:
        with callers() as threads, paused(one_sum):
            late = threads.submit(client.post, "/generate", json={"text": [SUM, SUM]})
            until(lambda: waiting(one_sum) == 2)
            client.post("/abort_request", json={"abort_all": True})
            assert late.result().status_code == 200
        seen = samples(client)
        assert not any(value for key, value in seen.items() if key[0] == "prompt_tokens_total")
        assert one_sum.stats()["prompt_tokens"] == before
        generate(client, SUM)
        assert samples(client)["prompt_tokens_total", "0"] == 5
        assert one_sum.stats()["prompt_tokens"] == before + 5
    lines = [vars(r) for r in caplog.records if r.msg == "enginepool.request"]
    figures = [line["prompt_tokens"] for line in lines if line["path"] == "/generate"]
    assert figures == [0, 5]


@pytest.mark.slow
def test_sighup_drains() -> None:
    """As with SIGTERM: running requests are answered, and the process exits with 0."""
    with process(**FEW_PROGRAMS) as one, callers() as threads:
        url = f"http://127.0.0.1:{one.wait_for('serving')['port']}"
        body = {"text": SUM, "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
        sent = threads.submit(httpx.post, f"{url}/generate", json=body, timeout=SECONDS)

        def busy() -> bool:
            return any(
                load["running"] for load in httpx.get(f"{url}/get_load", timeout=SECONDS).json()
            )

        until(lambda: sent.done() or busy())
        one.process.send_signal(signal.SIGHUP)
        assert sent.result().json()["meta_info"]["completion_tokens"] == 300
        assert one.end() == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("abort", [{"rid": "b"}, {"abort_all": True}])
def test_an_abort_before_submission(
    one_sum: EnginePool, abort: dict[str, Any], stream: bool
) -> None:
    """Texts are still being tokenized when their requests are aborted. They run no more."""
    lock = one_sum.runtime.input_processor.tokenizer.lock
    body = {"text": [SUM, SUM], "rid": ["a", "b"], "stream": stream}
    with (
        serving(one_sum, enable_admin=True) as one,
        one.http() as client,
        callers() as threads,
    ):
        with lock:
            sent = threads.submit(client.post, "/generate", json=body)
            until(lambda: lock.waiting or sent.done())
            assert client.post("/abort_request", json=abort).status_code == 200
        made = sent.result()
        if stream:
            *chunks, error, _ = [line[6:] for line in made.text.splitlines() if line]
            assert json.loads(error)["error"]["code"] == "aborted"
            outputs = {one["index"]: one for one in map(json.loads, chunks)}
        else:
            outputs = dict(enumerate(made.json()))
        ends = [outputs[i]["meta_info"]["finish_reason"]["type"] for i in (0, 1)]
        assert ends == (["abort", "abort"] if "abort_all" in abort else ["stop", "abort"])
        assert outputs[1]["output_ids"] == []
        # The id is free again, and a later request is not aborted.
        made = client.post("/generate", json={"text": SUM, "rid": "b"}).json()
        assert made["meta_info"]["finish_reason"]["type"] == "stop"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", BODIES["/generate"]),
        ("/v1/score", {"query": SUM, "items": [""], "label_token_ids": [49]}),
    ],
)
def test_a_request_that_is_not_submitted_yet(
    one_sum: EnginePool, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> None:
    """Its text is still being tokenized when the drain's time is over. It runs no more."""
    caplog.set_level("INFO", "enginepool")
    lock = one_sum.runtime.input_processor.tokenizer.lock
    with (
        serving(one_sum, drain_timeout=0.1) as one,
        one.http() as client,
        callers() as threads,
    ):
        with lock:
            sent = threads.submit(client.post, path, json=body)
            until(lambda: lock.waiting or sent.done())
            one.server.stop()
            until(lambda: any(r.msg == "enginepool.drain_timeout" for r in caplog.records))
        reply = sent.result()
    assert reply.status_code == 503, reply.text
    assert reply.json()["error"]["code"] == "draining"
    assert reply.headers["retry-after"] == "10"
