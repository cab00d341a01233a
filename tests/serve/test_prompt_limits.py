"""One client cannot delay the others with its own templates, or with bodies that fit no prompt."""

import subprocess
import sys
import time
from concurrent.futures import Future
from typing import Any

import psutil
import pytest

from tests.support.attacks import BODIES, CHAT, CONNECTIONS, GENERATE, SUM, body
from tests.support.liveness import callers, until
from tests.support.marks import slow
from tests.support.servers import Running

PROMPT_TOKENS = 505  # of the test pools
# Liveness, not speed: without the limits each of these delays the others for longer than this
# on a fast machine, and within them for no time that a client would notice.
PATIENCE = 8.0


@pytest.mark.parametrize(
    "name",
    ["chat_template", "tokenize", "tools", "return_tensors", "add_generation_prompt", "messages",
     "tokenizer_kwargs", "conversation", "max_length"],
)  # fmt: skip
def test_the_template_is_the_checkpoints(plain: Running, name: str) -> None:
    """Options of the rendering itself are refused by name. Variables of the template are
    accepted."""
    body = {"model": "toy", "messages": SUM, "temperature": 0}
    values: dict[str, Any] = {"chat_template": "x", "tokenize": False, "tools": [{}]}
    options = {name: values.get(name, 1)}
    with plain.http() as client:
        reply = client.post(CHAT, json={**body, "chat_template_kwargs": options})
        assert reply.status_code == 400
        assert f"'{name}' is not a variable of the template" in reply.json()["error"]["message"]
        assert reply.json()["error"]["param"] == "chat_template_kwargs"
        taken = client.post(CHAT, json={**body, "chat_template_kwargs": {"enable_thinking": True}})
        assert taken.json()["choices"][0]["message"]["content"] == "19"


def test_a_template_beside_the_messages(plain: Running) -> None:
    """It would have no effect, so it is an error."""
    with plain.http() as client:
        reply = client.post(CHAT, json={"model": "toy", "messages": SUM, "chat_template": "x"})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "chat_template"


# One of each kind: a template, a message, a prompt, ids, counts and a schema.
FIRST, *OTHERS = CONNECTIONS
USUAL = (
    "template", "messages", "prompt", "many ids", "131,072 requests", "schema",
)  # fmt: skip


@pytest.mark.parametrize("attack", [*USUAL, *slow(*(n for n in BODIES if n not in USUAL))])
def test_others_are_answered_meanwhile(plain: Running, attack: str) -> None:
    """The attacker gets a 400; a chat beside it and the probe are answered."""
    path, content = body(attack)
    longest = 0.0
    with callers(1) as threads, plain.http() as client, plain.http() as attacker:
        attacker.timeout = 300
        headers = {"Content-Type": "application/json"}
        sent: Future[Any] = threads.submit(attacker.post, path, content=content, headers=headers)
        while True:
            last = sent.done()
            started = time.monotonic()
            assert client.get("/health").status_code == 200
            reply = client.post(CHAT, json={"model": "toy", "messages": SUM, "temperature": 0})
            assert reply.json()["choices"][0]["message"]["content"] == "19"
            longest = max(longest, time.monotonic() - started)
            if last:
                break
        assert sent.result().status_code == 400, sent.result().text[:300]
    assert longest < PATIENCE


@pytest.mark.parametrize("attack", [FIRST, *slow(*OTHERS)])
def test_others_are_answered_beside_connections(plain: Running, attack: str) -> None:
    """Two hundred connections that send nothing or slowly, and streams that nobody reads."""
    url = plain.url()
    command = [sys.executable, "-m", "tests.support.attacks", url, attack]
    with plain.http() as client, subprocess.Popen(command) as attacker:
        try:
            until(lambda: len(psutil.Process(attacker.pid).net_connections("tcp")) > 5)
            for _ in range(5):
                started = time.monotonic()
                assert client.get("/health").status_code == 200
                reply = client.post(CHAT, json={"model": "toy", "messages": SUM, "temperature": 0})
                assert reply.json()["choices"][0]["message"]["content"] == "19"
                assert time.monotonic() - started < PATIENCE
            assert attacker.poll() is None
        finally:
            attacker.terminate()


def test_what_fits_is_taken(plain: Running) -> None:
    """The limits refuse nothing that an engine takes: the longest tokens, the most messages."""
    with plain.http() as client:
        params = {"max_new_tokens": 1}
        text = "<|endoftext|>" * PROMPT_TOKENS
        reply = client.post(GENERATE, json={"text": text, "sampling_params": params})
        assert reply.json()["meta_info"]["prompt_tokens"] == PROMPT_TOKENS
        reply = client.post(
            GENERATE, json={"text": text + "1", "sampling_params": {"max_new_tokens": 1}}
        )
        assert reply.status_code == 400
        assert "too many" in reply.json()["error"]["message"]
        turns = [{"role": "user", "content": [{"type": "text", "text": "1"}]}] * 50
        reply = client.post(CHAT, json={"model": "toy", "messages": turns, "max_tokens": 1})
        assert reply.json()["usage"]["prompt_tokens"] > 400
        ids = [[49] * 400] * 1000
        reply = client.post(GENERATE, json={"input_ids": ids, "sampling_params": params})
        assert len(reply.json()) == 1000
