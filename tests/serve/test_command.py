"""`enginepool serve` and `enginepool admin` as processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from itertools import chain
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from enginepool import EnginePool, toy
from enginepool.cli.admin import addresses
from enginepool.cli.arguments import parse_ports
from enginepool.cli.main import app
from enginepool.cli.server_args import parse_upstream_flags
from enginepool.errors import InvalidConfig
from tests.support.liveness import SECONDS, until
from tests.support.servers import Running, serving
from tests.support.xla import QUICK_TO_COMPILE

SUBTRACT = str(toy.checkpoint().parent / "subtract")
# XLA does not optimise, which is a third faster for a few tokens.
FEW_PROGRAMS = {
    "--warmup": "none",
    "--max-running-requests": "4",
    "--max-total-tokens": "1024",
    "--context-length": "512",
    "--max-prefill-tokens": "64",
    "--chunked-prefill-size": "64",
}


class Process:
    """A server in a process of its own, and its log."""

    def __init__(self, *flags: str, **options: str) -> None:
        self.process = subprocess.Popen(
            [
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
                *flags,
                *chain.from_iterable(options.items()),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "XLA_FLAGS": QUICK_TO_COMPILE},
        )
        self.events: list[dict[str, Any]] = []
        self.other: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                self.events.append(json.loads(line))
            except ValueError:
                self.other.append(line)

    def event(self, name: str, **fields: Any) -> dict[str, Any] | None:
        wanted = {"event": f"enginepool.{name}", **fields}
        return next((e for e in self.events if all(e.get(k) == v for k, v in wanted.items())), None)

    def wait_for(self, name: str) -> dict[str, Any]:
        until(lambda: self.event(name) or self.process.poll() is not None)
        event = self.event(name)
        assert event is not None, "".join(self.other)
        return event

    def end(self) -> int:
        code = self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        return code


@contextmanager
def process(*flags: str, **options: str) -> Iterator[Process]:
    one = Process(*flags, **options)
    try:
        yield one
    finally:
        one.process.kill()
        one.end()


@contextmanager
def half_a_request(port: int | None) -> Iterator[None]:
    with socket.create_connection(("127.0.0.1", port)) as one:
        head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        one.sendall(head + b"Content-Length: 100\r\n\r\n{")
        yield


def test_sigterm() -> None:
    """New requests get 503, running ones are answered in full, and the process exits with 0. A
    client whose body does not come does not delay it. All of the log is JSON."""
    with (
        process("--enable-admin", **FEW_PROGRAMS) as server,
        ExitStack() as until_the_end,
    ):
        url = f"http://127.0.0.1:{server.wait_for('serving')['port']}"
        port = httpx.URL(url).port
        until_the_end.enter_context(half_a_request(port))
        with httpx.Client(base_url=url, timeout=SECONDS) as http:
            with socket.create_connection(("127.0.0.1", port)) as garbage:
                garbage.sendall(b"no HTTP\r\n\r\n")
                assert garbage.recv(100).startswith(b"HTTP/1.1 400")
            body = {
                "model": "toy",
                "prompt": "12+7=",
                "stream": True,
                "max_tokens": 40,
                "ignore_eos": True,
                "stream_options": {"include_usage": True},
            }
            with http.stream("POST", "/v1/completions", json=body) as reply:
                lines = reply.iter_lines()
                next(lines)
                pause = {"mode": "in_place"}
                assert httpx.post(f"{url}/admin/pause", json=pause, timeout=SECONDS).json()["ok"]
                server.process.send_signal(signal.SIGTERM)
                server.wait_for("draining")
                late = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS)
                assert late.status_code == 503
                assert "shutting down" in late.json()["error"]["message"]
                assert late.headers["retry-after"]
                assert httpx.get(f"{url}/health", timeout=SECONDS).status_code == 200
                assert httpx.get(f"{url}/ready", timeout=SECONDS).status_code == 503
                assert httpx.post(f"{url}/admin/continue", timeout=SECONDS).json()["ok"]
                rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["usage"]["completion_tokens"] == 40
        assert server.end() == 0
        assert server.event("request", outcome="draining") is not None
        request = server.event("request", outcome="ok")
        assert request is not None
        assert request["engines"] == [0]
        assert request["completion_tokens"] == 40
        assert "12+7" not in json.dumps(server.events)
        assert server.other == []
        invalid = "Invalid HTTP request received."
        assert {e["logger"] for e in server.events if e["event"] == invalid} == {"uvicorn.error"}
        drained, closed = server.event("drained"), server.event("closed")
        assert drained is not None
        assert closed is not None
        waited = datetime.fromisoformat(closed["timestamp"]) - datetime.fromisoformat(
            drained["timestamp"]
        )
        # A second, with a margin for a busy machine, and not the 60 of a body.
        assert waited.total_seconds() < 10


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--dtyp", "float32"], "did you mean --dtype?"),
        (["--dtype", "float33"], "invalid choice"),
        (["--dp-size", "2"], "dp_size=2"),
        (["a", "b"], "'b'"),
        (["a", "--model-path", "b"], "two models"),
        (["--ports", "31003-31000"], "--ports"),
        (["--ports", "41050-9999999999"], "from 1 to 65535"),
        (["--ports", "0-3"], "from 1 to 65535"),
        (["--devices", "2", "--ports", "31001-31003"], "3 ports for 2 engines"),
        (["--host", "0.0.0.0", "--enable-admin"], "--admin-token"),
        (["--api-key", "secret\n"], "--api-key begins or ends with whitespace"),
        (["--host", "192.0.2.1"], "cannot listen"),
        (["--enable-lora"], "max_lora_rank and lora_target_modules"),
        (["--lora-resolver-dir", "."], "--enable-lora, and --max-loaded-loras"),
        (["--lora-resolver-dir", "./nowhere"], "nowhere: no such directory"),
    ],
)
def test_bad_arguments(args: list[str], why: str) -> None:
    """The error is one line, with exit code 2, before anything is built."""
    result = CliRunner().invoke(app, ["serve", "--port", "0", *args])
    assert result.exit_code == 2, result.output
    assert why in result.output
    assert len(result.output.splitlines()) == 1


def test_upstreams_flags() -> None:
    """Every option of ServerArgs has a flag. Options that were not given are not passed on."""
    assert parse_upstream_flags([]) == (None, {})
    args = (
        "--dtype bfloat16 --tp-size 2 --page-size 8 --trust-remote-code m "
        "--chunked-prefill-size -1 --enable-lora --max-lora-rank 8 --max-loaded-loras 6 "
        "--lora-target-modules q_proj v_proj"
    )
    assert parse_upstream_flags(args.split()) == (
        "m",
        {
            "dtype": "bfloat16",
            "tp_size": 2,
            "page_size": 8,
            "trust_remote_code": True,
            "chunked_prefill_size": -1,
            "enable_lora": True,
            "max_lora_rank": 8,
            "max_loaded_loras": 6,
            "lora_target_modules": ["q_proj", "v_proj"],
        },
    )
    assert parse_upstream_flags(["--model-path", "m"]) == ("m", {})
    with pytest.raises(InvalidConfig, match=r"^unknown argument '-n'$"):
        parse_upstream_flags(["-n", "4"])
    assert parse_ports("31000-31003") == (31000, 31001, 31002, 31003)
    assert parse_ports("5,7") == (5, 7)
    with pytest.raises(InvalidConfig):
        parse_ports("x")


def test_admin_client(administered: Running) -> None:
    """The reference's client with its sequence. Failures are printed, with exit code 1."""

    def admin(*args: str, code: int = 0) -> dict[str, Any]:
        result = CliRunner().invoke(app, ["admin", "--base-url", administered.url(3), *args])
        assert result.exit_code == code, result.output
        return json.loads(result.output)

    before = admin("checksum")
    done = admin("perturb", "--seed", "0", "--scale", "0.001", "--num-leaves", "2")
    assert done["checksum_before"] == before["checksum"]
    assert admin("checksum")["checksum"] == done["checksum_after"] != before["checksum"]
    assert admin("reload", SUBTRACT)["ok"] is True
    status = admin("status")
    assert (status["reloading"], status["last_ok"], status["last_error"]) == (False, True, None)
    assert status["model_path"] == SUBTRACT
    assert "outside" in admin("reload", "/nowhere", code=1)["error"]
    assert admin("pause", "--mode", "in_place") == {"ok": True}
    assert admin("continue") == {"ok": True}
    silent = CliRunner().invoke(app, ["admin", "--base-url", "http://127.0.0.1:9", "status"])
    assert silent.exit_code == 1


def test_admin_without_a_server() -> None:
    """A command's help needs none; the command itself says where the option goes."""
    told = CliRunner().invoke(app, ["admin", "checksum", "--help"])
    assert (told.exit_code, "checksum" in told.output) == (0, True)
    refused = CliRunner().invoke(app, ["admin", "checksum"])
    assert (refused.exit_code, "before the command" in refused.output) == (2, True)


def test_admin_of_many_servers(administered: Running, one_sum: EnginePool) -> None:
    """All are asked, even if one does not answer or refuses. Then the exit code is 1."""
    nobody = "http://127.0.0.1:9"

    def admin(urls: list[str], *args: str, code: int = 0) -> dict[str, Any]:
        where = chain.from_iterable(("--base-url", url) for url in urls)
        result = CliRunner().invoke(app, ["admin", *where, *args])
        assert result.exit_code == code, result.output
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        return {line["base_url"]: line["answer"] for line in lines}

    root = toy.checkpoint().parent
    with serving(one_sum, enable_admin=True, model_root=root) as other:
        both = [administered.url(), other.url()]
        before = admin(both, "checksum")
        assert [*before] == both
        new = admin(both, "reload", SUBTRACT, "--weight-version", "new", "--mode", "retract")
        assert all(answer["ok"] for answer in new.values())
        after = admin(both, "checksum")
        assert after[both[0]]["fingerprint"] == after[both[1]]["fingerprint"]
        assert after[both[0]] != before[both[0]]
        stati = admin([both[0], nobody, both[1]], "status", code=1)
        assert [*stati] == both
        assert {one["weight_version"] for one in stati.values()} == {"new"}
        one_sum.update_weights(toy.checkpoint(), weight_version=0)
        assert len(admin(both, "checksum", code=1)) == 2
    with serving(one_sum, enable_admin=True) as strict:  # has no --model-root
        both = [strict.url(), administered.url()]
        done = admin(both, "reload", SUBTRACT, code=1)
        assert [answer.get("ok", False) for answer in done.values()] == [False, True]


def test_a_checksum_from_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is printed, and a complaint says what is wrong."""
    reply = httpx.Response(200, json={"ok": True})
    monkeypatch.setattr(httpx, "request", lambda *_, **__: reply)
    told = CliRunner().invoke(app, ["admin", "--base-url", "http://other.example", "checksum"])
    assert told.exit_code == 1
    assert json.loads(told.stdout) == {"ok": True}
    assert "no fingerprint" in told.stderr


def test_every_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A headless Service's name has an address for each pod."""
    pods = ["10.0.0.7", "10.0.0.5", "10.0.0.7", "fd00::5"]

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == ("hosts.example", 30000)
        return [(0, 0, 0, "", (pod, port)) for pod in pods]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert addresses("http://hosts.example:30000/x") == [
        "http://10.0.0.5:30000/x",
        "http://10.0.0.7:30000/x",
        "http://[fd00::5]:30000/x",
    ]
    monkeypatch.undo()
    with pytest.raises(InvalidConfig, match=r"nobody\.invalid"):
        addresses("http://nobody.invalid")


@pytest.mark.parametrize("url", ["hosts", "localhost:30000", "http://[::1", "http://hosts:99999"])
def test_every_address_of_no_host(url: str) -> None:
    """It is one clear line. Without a host, no address of this machine stands in for it."""
    result = CliRunner().invoke(app, ["admin", "--base-url", url, "--every-address", "status"])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"enginepool: --base-url {url}: ")
    assert result.stderr.count("\n") == 1
