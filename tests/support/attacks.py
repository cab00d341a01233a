"""Attacks on a server: bodies that it refuses, below its limit of 16 MiB, and connections.

    python -m tests.support.attacks http://127.0.0.1:30000 "slow bodies"

holds the connections until it is ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from tests.support import grammars

SUM = [{"role": "user", "content": "12+7="}]
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
TOKENS, SCORE = "/inference/v1/generate", "/v1/score"
_CONNECTIONS = 200
_STREAMS = 8  # fewer than run at a time, so that other requests run too


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def _wide(count: int) -> dict[str, Any]:
    """The last property does not compile. The others before it do."""
    properties: dict[str, Any] = {f"p{i}": {"pattern": f"(a|b){{{i}}}c"} for i in range(count)}
    return {"type": "object", "properties": {**properties, "last": {"pattern": "("}}}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"not": {}}
    for _ in range(depth):
        schema = {"anyOf": [schema, {"type": "object", "properties": {"a": schema}}]}
        if len(json.dumps(schema)) > 1 << 16:
            break
    return schema


_SPIN = "{% for i in range(99999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
_TURN = {"role": "user", "content": ""}
_BODIES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "template": (CHAT, lambda: {"messages": SUM, "chat_template_kwargs": {"chat_template": _SPIN}}),
    "messages": (CHAT, lambda: {"messages": [_TURN] * 450_000}),
    "not messages": (CHAT, lambda: {"messages": [1] * 1_000_000}),
    "parts": (CHAT, lambda: {"messages": [{**_TURN, "content": [1] * 1_000_000}]}),
    "characters": (CHAT, lambda: {"messages": [{**_TURN, "content": "1" * (15 << 20)}]}),
    "prompt": (COMPLETIONS, lambda: {"prompt": "1" * (15 << 20)}),
    "not prompts": (COMPLETIONS, lambda: {"prompt": ["a", 1] * 500_000}),
    "text": (GENERATE, lambda: {"text": "1" * (15 << 20)}),
    "ids": (GENERATE, lambda: {"input_ids": [1] * 7_500_000}),
    "ids as a prompt": (COMPLETIONS, lambda: {"prompt": [1] * 7_500_000}),
    "many ids": (GENERATE, lambda: {"input_ids": [[1] * 8000] * 900}),
    "deep": (GENERATE, lambda: {"text": "1", "sampling_params": json.loads("[" * 900 + "]" * 900)}),
    "131,072 requests": (
        GENERATE,
        lambda: {"input_ids": [[1]] * 1024, "sampling_params": {"n": 128, "max_new_tokens": 1}},
    ),
    "131,072 prompts": (COMPLETIONS, lambda: {"prompt": ["1"] * 131_072, "max_tokens": 1}),
    "rids": (GENERATE, lambda: {"text": ["1"] * 900, "rid": ["r" * 16_000] * 900}),
    "model": (CHAT, lambda: {"messages": SUM, "stream": True, "model": "m" * (15 << 20)}),
    "extra key": (GENERATE, lambda: {"text": ["1" * 99] * 99, "extra_key": "k" * (15 << 20)}),
    "stop": (CHAT, lambda: {"messages": SUM, "stop": "s" * (15 << 20)}),
    "stops": (GENERATE, lambda: {"text": "1", "sampling_params": {"stop": ["ab"] * 20_000}}),
    "schema": (CHAT, lambda: {"messages": SUM, "response_format": _format(_wide(2_000))}),
    "names": (GENERATE, lambda: {f"n{i}": 1 for i in range(900_000)}),
    "input": ("/v1/responses", lambda: {"input": "1" * (15 << 20)}),
    "input items": (
        "/v1/responses",
        lambda: {"input": [{"role": "user", "content": ""}] * 400_000},
    ),
    "token ids": (TOKENS, lambda: {"token_ids": [1] * 7_500_000, "sampling_params": {}}),
    "text to tokenize": ("/tokenize", lambda: {"prompt": "1" * (15 << 20)}),
    "texts to tokenize": ("/tokenize", lambda: {"prompt": ["1"] * 500_000}),
    "ids to detokenize": ("/detokenize", lambda: {"tokens": [1] * 7_500_000}),
    "scores": (
        SCORE,
        lambda: {"query": "1" * 20_000, "items": ["1"] * 1000, "label_token_ids": [1]},
    ),
    "labels": (SCORE, lambda: {"query": "1", "items": ["1"], "label_token_ids": [1] * 5_000_000}),
    "deep schema": (CHAT, lambda: {"messages": SUM, "response_format": _format(_nested(60))}),
    "chain of schemas": (
        CHAT,
        lambda: {"messages": SUM, "response_format": _format(grammars.chain_of_schemas(1400))},
    ),
    "chain of rules": (CHAT, lambda: {"messages": SUM, "ebnf": grammars.chain_of_rules(4000)}),
    "grammar without end": (CHAT, lambda: {"messages": SUM, "ebnf": grammars.without_end()}),
    "lists": (CHAT, lambda: {"messages": SUM, "response_format": _format(grammars.lists(200))}),
    "numbers": (
        CHAT,
        lambda: {"messages": SUM, "response_format": _format(grammars.multiples(150))},
    ),
    "long expression": (CHAT, lambda: {"messages": SUM, "regex": grammars.long_expression()}),
}
BODIES = tuple(_BODIES)


def body(name: str) -> tuple[str, str]:
    """A path, and a body that it refuses with 400."""
    path, make = _BODIES[name]
    return path, _compact(path, make())


def _compact(path: str, fields: dict[str, Any]) -> str:
    model = {} if path in (GENERATE, SCORE, TOKENS) else {"model": "toy"}
    return json.dumps({**model, **fields}, separators=(",", ":"))


def slow_headers(url: str) -> None:
    """Connections that send their headers byte by byte."""
    _trickle(url, lambda: b"", b"POST /generate HTTP/1.1\r\nHost: x\r\n" + b"X-A: b\r\n" * 9999)


def slow_bodies(url: str) -> None:
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    _trickle(url, lambda: head + b"Content-Length: 99999\r\n\r\n", b'{"text": "' + b"1" * 99_000)


def silent(url: str) -> None:
    """Connections that send nothing."""
    _trickle(url, lambda: b"", b"")


def unread_streams(url: str) -> None:
    """Streams that nobody reads."""
    body = {"model": "toy", "prompt": "12+7=", "stream": True, "max_tokens": 400}
    content = json.dumps({**body, "ignore_eos": True, "logprobs": 20}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = head + b"Content-Length: %d\r\n\r\n" % len(content) + content
    with contextlib.ExitStack() as stack:
        for _ in range(_STREAMS):
            one = stack.enter_context(_connected(url, receive=1024))
            one.sendall(request)
        threading.Event().wait()


CONNECTIONS: dict[str, Callable[[str], None]] = {
    "silent connections": silent,
    "slow headers": slow_headers,
    "slow bodies": slow_bodies,
    "unread streams": unread_streams,
}


def _trickle(url: str, head: Callable[[], bytes], rest: bytes) -> None:
    """Send a byte on each connection ten times a second. One that the server closes is replaced."""
    with contextlib.ExitStack() as stack:
        sockets: list[tuple[socket.socket, int]] = []
        while True:
            while len(sockets) < _CONNECTIONS:
                one = stack.enter_context(_connected(url))
                one.sendall(head())
                sockets.append((one, 0))
            sockets = [(one, sent + 1) for one, sent in sockets if _send(one, rest, sent)]
            time.sleep(0.1)


def _send(one: socket.socket, rest: bytes, sent: int) -> bool:
    """Whether the connection is still open."""
    try:
        if rest:
            one.sendall(rest[sent % len(rest) : sent % len(rest) + 1])
        one.setblocking(False)
        try:
            return bool(one.recv(1))
        except BlockingIOError:
            return True
        finally:
            one.setblocking(True)
    except OSError:
        return False


@contextlib.contextmanager
def _connected(url: str, receive: int | None = None) -> Iterator[socket.socket]:
    where = urlsplit(url)
    with socket.socket() as one:
        if receive is not None:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        one.connect((where.hostname, where.port))
        yield one


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.attacks")
    parser.add_argument("url")
    parser.add_argument("attack", choices=CONNECTIONS)
    options = parser.parse_args()
    CONNECTIONS[options.attack](options.url)


if __name__ == "__main__":
    main()
