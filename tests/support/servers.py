"""A server in this process on loopback, and its clients."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from enginepool import EnginePool
from enginepool.serve.options import ServeOptions
from enginepool.serve.server import Server
from tests.support.liveness import SECONDS


@dataclass
class Running:
    server: Server

    def url(self, engine: int | None = None) -> str:
        port = self.server.port if engine is None else self.server.engine_ports[engine]
        return f"http://127.0.0.1:{port}"

    def http(self, engine: int | None = None, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url(engine), timeout=SECONDS, **options)

    def openai(self, api_key: str = "none") -> openai.OpenAI:
        url = f"{self.url()}/v1"
        return openai.OpenAI(base_url=url, api_key=api_key, max_retries=0, timeout=SECONDS)


@contextmanager
def serving(pool: EnginePool, **options: Any) -> Iterator[Running]:
    """Runs a server inside the block, and drains it at the end."""
    server = Server(pool, ServeOptions(**{"port": 0, "drain_timeout": 10.0, **options}))
    ready, failures = threading.Event(), []

    def run() -> None:
        try:
            server.run(ready.set)
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="server")
    thread.start()
    assert ready.wait(SECONDS)
    assert not failures
    try:
        yield Running(server)
    finally:
        server.stop()
        thread.join(SECONDS)
        assert not thread.is_alive(), "the server did not end"


def generate(client: httpx.Client, text: str, **params: Any) -> dict[str, Any]:
    """A greedy `/generate`."""
    reply = client.post(
        "/generate", json={"text": text, "sampling_params": {"temperature": 0, **params}}
    )
    assert reply.status_code == 200, reply.text
    return reply.json()
