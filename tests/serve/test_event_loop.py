"""Work that takes long runs beside the event loop, which serves other clients meanwhile."""

import threading
from typing import Any

import pytest

from enginepool.serve import bodies, exchange, openai_serving, scoring, token_api
from tests.support.liveness import SECONDS, callers
from tests.support.servers import Running

SUM = "12+7="
TURNS = [{"role": "user", "content": SUM}]
GREEDY = {"temperature": 0}
LARGE = "1" * (bodies._SMALL + 1)  # a body that is refused once it is parsed
PROMPT = {"text": SUM, "sampling_params": GREEDY}
CASES: list[tuple[Any, str, str, dict[str, Any], int]] = [
    (bodies, "_parse", "/generate", {"text": SUM, "extra_key": LARGE}, 400),
    (openai_serving.Chat, "_adapt", "/v1/chat/completions", {"model": "", "messages": TURNS}, 200),
    (openai_serving.Completion, "_adapt", "/v1/completions", {"model": "", "prompt": SUM}, 200),
    (exchange.Exchange, "_make_call", "/generate", PROMPT, 200),
    (exchange.Exchange, "_make_call", "/inference/v1/generate",
     {"token_ids": [49], "sampling_params": GREEDY}, 200),
    (scoring.ScoreExchange, "_make_score_call", "/v1/score",
     {"query": SUM, "items": [""], "label_token_ids": [49]}, 200),
    (token_api, "_tokenized", "/tokenize", {"prompt": SUM}, 200),
    (token_api, "_text", "/detokenize", {"tokens": [49]}, 200),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "name", "path", "body", "status"), CASES)
def test_others_are_answered_while_it_goes_on(
    plain: Running,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    path: str,
    body: dict[str, Any],
    status: int,
) -> None:
    """The work waits until a probe has its answer. On the event loop neither would end."""
    began, answered = threading.Event(), threading.Event()
    real = getattr(owner, name)

    def held(*args: Any, **kwargs: Any) -> Any:
        began.set()
        assert answered.wait(SECONDS)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, held)
    with callers(1) as threads, plain.http() as client, plain.http() as probe:
        reply = threads.submit(client.post, path, json=body)
        assert began.wait(SECONDS)
        try:
            assert probe.get("/health", timeout=SECONDS / 2).status_code == 200
        finally:
            answered.set()
        assert reply.result(SECONDS).status_code == status
