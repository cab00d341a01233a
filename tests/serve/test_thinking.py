"""The form of a thinking model's output applies after its thinking, and not before."""

import json
from typing import Any

import pytest
from sgl_jax.srt.reasoning_parser import BaseReasoningFormatDetector, ReasoningParser

from enginepool import EnginePool
from enginepool.dispatch.thinking import Thinking, Thought
from tests.support.servers import Running

# The toy answers "19". Its thinking is "1", or all of it.
TURNS: Any = [{"role": "user", "content": "12+7="}]
BODY: dict[str, Any] = {"model": "toy", "messages": TURNS, "temperature": 0, "max_tokens": 100}
LETTERS = {"regex": "[ab]{3}", "temperature": 0}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"day": {"enum": [1, 2]}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def thinks(sums: EnginePool, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the engines' model think up to this marker."""

    def until_(end: str, begin: str = "<t>", *, begun: bool = True) -> None:
        class Detector(BaseReasoningFormatDetector):
            def __init__(self, stream_reasoning: bool = True) -> None:
                super().__init__(begin, end, begun, stream_reasoning)

        monkeypatch.setitem(ReasoningParser.DetectorMap, "toy", Detector)
        for worker in sums.runtime.workers:
            assert worker.engine is not None
            args = worker.engine.server_args
            monkeypatch.setattr(args, "reasoning_parser", "toy")
            monkeypatch.setattr(args, "tool_call_parser", "qwen25")
            monkeypatch.setattr(args, "constrained_json_disable_any_whitespace", True)

    return until_


def ask(server: Running, **fields: Any) -> Any:
    """The message, and the same message from a stream."""
    with server.http() as client:
        reply = client.post("/v1/chat/completions", json=BODY | fields)
        assert reply.status_code == 200, reply.text
        streamed = client.post("/v1/chat/completions", json=BODY | fields | {"stream": True})
    whole = [
        (choice["message"]["reasoning_content"] or "", choice["message"]["content"] or "")
        for choice in reply.json()["choices"]
    ]
    *chunks, done = [line[6:] for line in streamed.text.splitlines() if line]
    assert done == "[DONE]"
    pieces = [["", ""] for _ in whole]
    for chunk in map(json.loads, chunks):
        for choice in chunk["choices"]:
            delta = choice["delta"]
            pieces[choice["index"]][0] += delta["reasoning_content"] or ""
            pieces[choice["index"]][1] += delta["content"] or ""
    assert [tuple(piece) for piece in pieces] == whole
    return whole


@pytest.mark.parametrize(("end", "thought"), [("1", ""), ("19", ""), ("9", "1")])
def test_a_form(plain: Running, thinks: Any, end: str, thought: str) -> None:
    """After a marker of one token or of several."""
    thinks(end)
    ((reasoning, content),) = ask(plain, **LETTERS)
    assert reasoning == thought
    assert len(content) == 3
    assert set(content) <= set("ab")


def test_samples_with_seeds(plain: Running, thinks: Any) -> None:
    thinks("1")
    answers = ask(plain, regex="[ab]{9}", n=4, seed=3)
    assert all(len(content) == 9 and set(content) <= set("ab") for _, content in answers)


def test_a_call(plain: Running, thinks: Any) -> None:
    """A call that must be made, whole, streamed and as a response."""
    thinks("9")
    fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "seed": 1}
    fields |= {"parallel_tool_calls": False}
    with plain.http() as client:
        reply = client.post("/v1/chat/completions", json=BODY | fields).json()
        (choice,) = reply["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning_content"] == "1"
        for call in choice["message"]["tool_calls"]:
            assert json.loads(call["function"]["arguments"])["day"] in (1, 2)
        body = {"model": "toy", "input": "12+7=", "temperature": 0, "max_output_tokens": 200}
        tool = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
        made = client.post("/v1/responses", json=body | fields | {"tools": [tool]}).json()
        kinds = [item["type"] for item in made["output"]]
        assert kinds[0] == "reasoning"
        assert set(kinds[1:]) == {"function_call"}


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_response(plain: Running, thinks: Any, stream: bool) -> None:
    """A message has those of its own tokens, and none of the thinking before it."""
    thinks("9")
    form = {"type": "json_schema", "name": "letters", "schema": {"enum": ["ab"]}}
    body = {
        "model": "toy", "input": "12+7=", "temperature": 0, "text": {"format": form},
        "include": ["message.output_text.logprobs"], "stream": stream,
    }  # fmt: skip
    with plain.http() as client:
        reply = client.post("/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    made = reply.json() if not stream else json.loads(reply.text.split("data: ")[-1])["response"]
    thought, said = made["output"]
    assert thought["content"][0]["text"] == "1"
    (part,) = said["content"]
    assert part["text"] == json.dumps("ab")
    tokens = [one["token"] for one in part["logprobs"]]
    assert "".join(tokens) == part["text"] + "<|im_end|>"


def test_nothing_is_thought(plain: Running, thinks: Any) -> None:
    """The prompt ends with the marker, as templates without thinking write it, or the model need
    not think. The form and the answer begin at once."""
    thinks("assistant")
    ((reasoning, content),) = ask(plain, **LETTERS)
    assert (reasoning, len(content)) == ("", 3)
    thinks("9", begun=False)
    ((reasoning, content),) = ask(plain, **LETTERS)
    assert (reasoning, len(content)) == ("", 3)


def test_a_model_that_may_think(plain: Running, thinks: Any) -> None:
    """The marker before thinking is allowed beside the form's first tokens. Here the model
    writes it first, and is then free up to the marker after thinking."""
    thinks("9", "1", begun=False)
    ((reasoning, content),) = ask(plain, **LETTERS)
    assert (reasoning, len(content)) == ("", 3)
    assert set(content) <= set("ab")


def test_it_goes_on_where_it_was(plain: Running, thinks: Any, sums: EnginePool) -> None:
    """It leaves an engine and enters one again, inside its thinking and after it."""
    thinks("9")
    body = BODY | {"regex": "[ab]{80}", "temperature": 1.0, "seed": 5, "max_tokens": 200}
    with plain.http() as client:
        expected = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        text = ""
        with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as reply:
            for line in reply.iter_lines():
                if not line or line == "data: [DONE]":
                    continue
                (choice,) = json.loads(line[6:])["choices"]
                more = choice["delta"]["content"] or ""
                if len(text) // 20 < len(text + more) // 20:
                    sums.pause_generation("retract")
                    sums.continue_generation()
                text += more
    assert text == expected["content"]
    assert len(text) == 80


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_mark_in_any_tokens(size: int) -> None:
    """However the model spells the marker. Text that the last token has after the marker is
    reported."""
    text = "a < b</think>\n"
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    thought = Thought(Thinking((7,), "</think>", True, pieces.__getitem__))
    said = [thought.take(token, fits_answer=False) for token in range(len(pieces))]
    assert thought.state == "is over"
    taken = [one for one in said if one is not None]
    assert not any(taken)
    assert thought.take(0, fits_answer=True) is None
