"""If the log cannot be written, only its lines are lost."""

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

import httpx
import psutil
import pytest
import structlog

from enginepool import EnginePool
from enginepool.logs import logger
from enginepool.serve.log import KEPT, LogLines
from enginepool.serve.log_format import log_to
from tests.serve.test_command import FEW_PROGRAMS
from tests.support.liveness import SECONDS, callers, until
from tests.support.servers import serving
from tests.support.xla import QUICK_TO_COMPILE

REQUESTS = 200
FIELDS = {
    *("path", "status", "outcome", "seconds", "ids", "engines", "prompt_tokens"),
    *("completion_tokens", "first_output_seconds", "error", "prompts"),
}


@contextlib.contextmanager
def log_of(*, terminal: bool) -> Iterator[list[str]]:
    """The log lines of this process during the block, as they would be on a server's standard
    error."""
    reader, writer = os.pipe()
    lines, configured, before = LogLines(writer), structlog.is_configured(), structlog.get_config()
    os.close(writer)
    root = logging.getLogger()
    handlers = list(root.handlers)
    written: list[str] = []
    try:
        log_to(lines, terminal=terminal)
        yield written
    finally:
        structlog.configure(**before) if configured else structlog.reset_defaults()
        logging.captureWarnings(False)
        root.handlers[:] = handlers
        lines.close(SECONDS)
        with open(reader, "rb") as stream:
            written += stream.read().decode().splitlines()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_traceback_shows_no_locals(terminal: bool) -> None:
    """A local variable may be a prompt."""

    def fails(prompt: str) -> None:
        raise RuntimeError(f"{len(prompt)} characters")

    with log_of(terminal=terminal) as written:
        try:
            fails(" ".join(["zebra", "umbrella"]))
        except RuntimeError as error:
            logger().error("enginepool.internal_error", exc_info=error)
            logging.getLogger("uvicorn.error").exception("again")
    text = "\n".join(written)
    assert text.count("14 characters") == 2
    assert "zebra umbrella" not in text


def test_control_characters_are_escaped() -> None:
    """In lines of this package and of others, for everything that clients send."""
    clear, title = "\x1b[2J", "\x1b]0;x\x07"
    with log_of(terminal=True) as written:
        logger().info("enginepool.request", path=f"/{clear}", error=f"{title}\n\x9b1m", ids=[clear])
        logging.getLogger("uvicorn.error").warning("Invalid host %s\r\nforged", title)
        try:
            raise ValueError(f"{clear}\u202e")
        except ValueError as error:
            logger().error("enginepool.internal_error", exc_info=error)
    own = re.sub(r"\x1b\[\d*m", "", "\n".join(written))  # the log's own colours
    assert all(line.isprintable() for line in own.split("\n"))
    for told in (r"/\x1b[2J", r"\x1b]0;x\x07", r"\x9b1m", r"\u202e", r"x\x07\r\nforged"):
        assert told in own


def port_of(server: subprocess.Popen[bytes]) -> int:
    """The port where it listens, from the operating system, because its log cannot be read."""
    ports: list[int] = []

    def listens() -> bool:
        assert server.poll() is None, "the server ended"
        sockets = psutil.Process(server.pid).net_connections("tcp")
        ports.extend(one.laddr.port for one in sockets if one.status == psutil.CONN_LISTEN)
        return bool(ports)

    until(listens)
    return ports[0]


@contextlib.contextmanager
def unwritable(kind: str) -> Iterator[dict[str, Any]]:
    """A standard error that cannot be written, for Popen."""
    with contextlib.ExitStack() as stack:
        if kind == "closed":
            yield {"preexec_fn": lambda: os.close(2)}
        elif kind == "full disk":
            yield {"stderr": stack.enter_context(open("/dev/full", "wb"))}
        else:
            reader, writer = os.pipe()
            stack.callback(os.close, writer)
            if kind == "nobody reads":
                stack.callback(os.close, reader)
                os.set_blocking(writer, False)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        os.write(writer, b"x" * 4096)
                os.set_blocking(writer, True)
            else:
                os.close(reader)
            yield {"stderr": writer}


@pytest.mark.parametrize("kind", ["full disk", "broken pipe"])
def test_lines_that_cannot_be_written(kind: str) -> None:
    """They are lost. The writer gets no error, and the log closes."""
    with unwritable(kind) as options:
        file = options["stderr"]
        lines = LogLines(file if isinstance(file, int) else file.fileno())
        for number in range(REQUESTS):
            lines.write(json.dumps({"number": number}) + "\n")
        lines.close(SECONDS)
    assert lines.take_lost() == REQUESTS


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full disk", "closed", "broken pipe", "nobody reads"])
def test_requests_are_answered_and_the_drain_ends_with_0(kind: str) -> None:
    command = [
        *(
            sys.executable,
            "-m",
            "enginepool.cli.main",
            "serve",
            "--port",
            "0",
            "--devices",
            "1",
        ),
        *chain.from_iterable(FEW_PROGRAMS.items()),
    ]
    with unwritable(kind) as options:
        server = subprocess.Popen(
            command, env={**os.environ, "XLA_FLAGS": QUICK_TO_COMPILE}, **options
        )
        try:
            url = f"http://127.0.0.1:{port_of(server)}"
            with httpx.Client(base_url=url, timeout=SECONDS) as http:

                def ready() -> bool:
                    assert server.poll() is None, "the server ended"
                    with contextlib.suppress(httpx.TransportError):
                        return http.get("/ready").status_code == 200
                    return False

                until(ready)
                body = {"text": "12+7=", "sampling_params": {"temperature": 0}}
                with callers() as threads:
                    sent = [
                        threads.submit(http.post, "/generate", json=body) for _ in range(REQUESTS)
                    ]
                for reply in (one.result() for one in sent):
                    assert (reply.status_code, reply.json()["text"]) == (200, "19")
                assert http.post("/generate", json={"text": ""}).status_code == 400
                assert http.get("/nowhere").status_code == 404
                params = {"max_new_tokens": 100, "ignore_eos": True}
                stream = {"text": "1+1=", "stream": True, "sampling_params": params}
                with http.stream("POST", "/generate", json=stream) as reply:
                    lines = (line for line in reply.iter_lines() if line)
                    next(lines)
                    server.send_signal(signal.SIGTERM)
                    *_, last, done = lines
                assert done == "data: [DONE]"
                assert json.loads(last[6:])["meta_info"]["completion_tokens"] == 100
            assert server.wait(SECONDS) == 0
        finally:
            server.kill()
            server.wait()


@pytest.mark.parametrize("log_prompts", [False, True])
def test_the_line_of_a_request(
    one_sum: EnginePool, caplog: pytest.LogCaptureFixture, log_prompts: bool
) -> None:
    """How it ended, its seconds, its id and its tokens. Prompts only with the option."""
    params = {"temperature": 0, "n": 2}
    body = {"text": "12+7=", "rid": "mine", "stream": True, "sampling_params": params}
    with caplog.at_level("INFO", "enginepool"):
        with serving(one_sum, log_prompts=log_prompts) as running, running.http() as client:
            assert client.post("/generate", json=body).status_code == 200
            assert client.post("/generate", json={"text": ""}).status_code == 400
            assert client.get("/nowhere").status_code == 404
        lines = [vars(r) for r in caplog.records if r.msg == "enginepool.request"]
    served, empty, nowhere = ({k: v for k, v in one.items() if k in FIELDS} for one in lines)
    assert 0 < served.pop("first_output_seconds") <= served.pop("seconds") < 60
    asked = {"prompts": ["12+7="]} if log_prompts else {}
    assert served == {
        "path": "/generate",
        "status": 200,
        "outcome": "ok",
        "ids": ["mine"],
        "engines": [0],
        "prompt_tokens": 5,
        "completion_tokens": 6,
        **asked,
    }
    assert (empty["path"], empty["status"], empty["outcome"]) == ("/generate", 400, "refused")
    assert empty["seconds"] >= 0
    assert empty["error"]
    assert "ids" not in empty
    refused = {"path": "/nowhere", "status": 404, "outcome": "refused", "error": "Not Found"}
    assert nowhere == refused


def test_a_log_that_can_be_written_again_says_how_much_is_lost() -> None:
    """Nobody read for a while. The lost lines are counted, and a line has the count."""
    reader, writer = os.pipe()
    lines = LogLines(writer)
    try:
        started = time.monotonic()
        for number in range(KEPT * 3):
            lines.write(json.dumps({"number": number}) + "\n")
        assert time.monotonic() - started < 30  # liveness: nobody reads
        os.close(writer)  # the log has its own descriptor
        with open(reader, "rb") as stream, callers(1) as threads:
            threads.submit(lines.close, 60)
            read = stream.read()  # to the end: waiting lines are written before the log closes
    finally:
        lines.close()
    found = [json.loads(line) for line in read.decode().splitlines()]
    numbers = [line["number"] for line in found if "number" in line]
    assert numbers == sorted(numbers)
    lost = [line["lines"] for line in found if line.get("event") == "enginepool.log_lines_lost"]
    assert lost
    assert len(numbers) + sum(lost) == KEPT * 3
