"""Clients that connect and send nothing, or send slowly, are disconnected."""

import contextlib
import os
import resource
import socket
import time
from collections.abc import Iterator

import pytest

from enginepool import EnginePool
from tests.support.liveness import SECONDS, callers, paused, until, waiting
from tests.support.servers import Running, generate, serving

BODY = b'{"text": "12+7=", "sampling_params": {"temperature": 0}}'
HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)


@pytest.fixture(scope="module")
def quick(sums: EnginePool) -> Iterator[Running]:
    with serving(sums, header_timeout=0.5, body_timeout=0.5, keep_alive_timeout=1) as running:
        yield running


@contextlib.contextmanager
def connected(running: Running) -> Iterator[socket.socket]:
    address = ("127.0.0.1", running.server.port)
    with socket.create_connection(address, timeout=SECONDS) as one:
        yield one


def rest(one: socket.socket) -> bytes:
    """Everything that comes until the server closes."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := one.recv(65536):
            said += piece
    return said


def trickle(one: socket.socket, data: bytes) -> None:
    """Send a byte at a time, so slowly that all of them take longer than the server waits."""
    with contextlib.suppress(OSError):
        for byte in data:
            one.sendall(bytes([byte]))
            time.sleep(0.05)


def test_no_descriptor_is_left(plain: Running, caplog: pytest.LogCaptureFixture) -> None:
    """The log reports dropped connections, once until some descriptors are free."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def told() -> list[str]:
        return [one.msg for one in caplog.records if one.msg == "enginepool.connections_dropped"]

    with caplog.at_level("WARNING", "enginepool"), contextlib.ExitStack() as open_ones:
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, limits[1]))
        open_ones.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        with contextlib.suppress(OSError):
            while True:
                open_ones.enter_context(socket.socket())
        until(told)
    with plain.http() as client:
        assert client.get("/health").status_code == 200
    assert len(told()) == 1


def test_nothing_is_said(quick: Running) -> None:
    with connected(quick) as one:
        assert rest(one) == b""


@pytest.mark.parametrize("said", [b"P", HEAD[:-2], HEAD])
def test_headers_that_do_not_end(quick: Running, said: bytes) -> None:
    with connected(quick) as one:
        one.sendall(said)
        assert rest(one) == b""


def test_headers_by_the_byte(quick: Running) -> None:
    """The limit is on all headers, not on the time between two bytes."""
    with connected(quick) as one:
        trickle(one, HEAD)
        assert rest(one) == b""


@pytest.mark.parametrize("said", [b"", BODY[:-1]])
def test_bodies_that_do_not_end(quick: Running, said: bytes) -> None:
    """A 408 with the reason, and the connection is closed."""
    with connected(quick) as one:
        one.sendall(HEAD + LENGTH + said)
        reply = rest(one)
    assert reply.startswith(b"HTTP/1.1 408")
    assert b"--body-timeout" in reply


def test_a_body_by_the_byte(quick: Running) -> None:
    with connected(quick) as one:
        one.sendall(HEAD + LENGTH)
        trickle(one, BODY)
        assert rest(one).startswith(b"HTTP/1.1 408")


def test_idle_after_a_reply(quick: Running) -> None:
    """Two answers on one connection, then it is closed. The same in the middle of a third
    request."""
    for begun in (b"", HEAD):
        with connected(quick) as one:
            for _ in range(2):
                one.sendall(HEAD + LENGTH + BODY)
                reply = b""
                while b'"text":"19"' not in reply:
                    reply += one.recv(65536)
            one.sendall(begun)
            rest(one)


def test_answers_take_their_time(quick: Running, sums: EnginePool) -> None:
    """The limits are on what a client sends. A client that waits for its answer keeps its
    connection."""
    with quick.http() as client, callers(1) as threads:
        with paused(sums):
            sent = threads.submit(generate, client, "12+7=")
            until(lambda: waiting(sums))
            for _ in range(4):  # each takes as long as the limit
                with connected(quick) as one:
                    rest(one)
            assert not sent.done()
        assert sent.result()["text"] == "19"
