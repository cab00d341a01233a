"""A stream has the same content as the reply, for any request and for any chunks of text."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from enginepool.serve.stream_parsers import Calls, Reasoning, cut_calls
from tests.serve.test_native import samples
from tests.support.liveness import until
from tests.support.marks import slow
from tests.support.pools import MakePool
from tests.support.servers import Running, serving

TURNS: Any = [{"role": "user", "content": "12+7="}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def tool(name: str, **properties: str) -> dict[str, Any]:
    bounds = {"string": {"maxLength": 4}, "integer": {"minimum": 0, "maximum": 99}}
    short = {key: {"type": kind, **bounds[kind]} for key, kind in properties.items()}
    schema = {
        "type": "object", "properties": short, "required": list(short),
        "additionalProperties": False,
    }  # fmt: skip
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("look", place="string", days="integer"), tool("stop")]


@pytest.fixture(scope="module")
def server(make_pool: MakePool) -> Iterator[Running]:
    pool = make_pool(
        "toy", 1, tool_call_parser="qwen25", constrained_json_disable_any_whitespace=True
    )
    with serving(pool) as running:
        yield running


def post(server: Running, path: str, body: dict[str, Any]) -> Any:
    """The reply, or the chunks of the stream."""
    with server.http() as client:
        reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        return reply.json()
    *chunks, done = [line[6:] for line in reply.text.splitlines() if line]
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def of_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """The content of one answer in a reply."""
    message = choice.get("message") or {"content": choice.get("text")}
    logprobs = choice["logprobs"] or {}
    content = logprobs.get("content") or []
    return {
        "text": (message["content"] or "").strip(),
        "calls": [
            (call["function"]["name"], _arguments(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        ],
        "finish": choice["finish_reason"],
        "tokens": [entry["token"] for entry in content] + (logprobs.get("tokens") or []),
        "ids": choice.get("token_ids"),
    }


def of_chunks(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """The content of a stream, joined. Each answer has one role and one end."""
    made: dict[int, dict[str, Any]] = {}
    arguments: dict[tuple[int, int], str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            one = made.setdefault(
                index, {"text": "", "calls": [], "finish": None, "tokens": [], "ids": None}
            )
            assert one["finish"] is None, "after its end"
            delta = choice.get("delta") or {"content": choice.get("text")}
            one["text"] += delta["content"] or ""
            for call in delta.get("tool_calls") or ():
                place = index, call["index"]
                if call["id"] is not None:
                    assert call["index"] == len(one["calls"])
                    one["calls"].append(call["function"]["name"])
                arguments[place] = arguments.get(place, "") + call["function"]["arguments"]
            logprobs = choice["logprobs"] or {}
            one["tokens"] += [entry["token"] for entry in logprobs.get("content") or ()]
            one["tokens"] += logprobs.get("tokens") or []
            if choice.get("token_ids") is not None:
                one["ids"] = (one["ids"] or []) + choice["token_ids"]
            one["finish"] = choice["finish_reason"]
    for index, one in made.items():
        one["text"] = one["text"].strip()
        one["calls"] = [
            (name, _arguments(arguments[index, place])) for place, name in enumerate(one["calls"])
        ]
    return made


def _arguments(text: str) -> Any:
    """A call that was cut has the arguments so far."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def asked(rng: random.Random, path: str) -> dict[str, Any]:
    """Any combination of fields that change the form of an answer."""
    body: dict[str, Any] = {
        "model": "toy", "max_tokens": rng.choice([1, 5, 200]), "seed": rng.randrange(99),
        "temperature": rng.choice([0, 1.0]), "n": rng.choice([1, 2, 3]),
    }  # fmt: skip
    if rng.random() < 0.5:
        body["return_token_ids"] = True
    if rng.random() < 0.2:
        body["stop"] = rng.choice(["9", ["1", "4"]])
    if path == COMPLETIONS:
        body["prompt"] = rng.choice(["12+7=", ["12+7=", "30+4="], [49, 43, 49, 61]])
        body["logprobs"] = rng.choice([None, 0, 2])
        body["echo"] = rng.random() < 0.3
    else:
        body["messages"] = TURNS
        body["logprobs"] = rng.random() < 0.5
    if body["logprobs"] not in (None, False) and rng.random() < 0.5:
        body["return_tokens_as_token_ids"] = True
    if path == COMPLETIONS:
        return body
    kind = rng.choice(["text", "text", "auto", "required", "named", "form", "both"])
    if kind in ("auto", "required", "named", "both"):
        body.pop("stop", None)  # it would also cut calls
        body["tools"] = TOOLS
        body["tool_choice"] = kind if kind in ("auto", "required") else "auto"
        if kind == "named":
            body["tool_choice"] = {"type": "function", "function": {"name": "stop"}}
    if kind in ("form", "both"):
        schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"],
                  "additionalProperties": False}  # fmt: skip
        body["response_format"] = {
            "type": "json_schema", "json_schema": {"name": "a", "schema": schema},
        }  # fmt: skip
    return body


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_any_combination(server: Running, path: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        body = asked(rng, path)
        reply = post(server, path, body)
        usage = rng.random() < 0.5
        options = {"stream": True} | ({"stream_options": {"include_usage": True}} if usage else {})
        chunks = post(server, path, body | options)
        expected = {choice["index"]: of_choice(choice) for choice in reply["choices"]}
        got = of_chunks(chunks)
        assert got == expected, body
        if usage:
            assert chunks[-1]["choices"] == []
            told = [
                {name: value for name, value in one["usage"].items() if value is not None}
                for one in (chunks[-1], reply)
            ]
            assert told[0] == told[1]
        assert len({chunk["id"] for chunk in chunks}) == 1


def test_responses_with_logprobs_and_calls(server: Running) -> None:
    """Log-probabilities of a call's tokens begin no message."""
    tool: Any = {"type": "function", **TOOLS[0]["function"]}
    events = server.openai().responses.create(
        model="toy", input="12+7=", stream=True, max_output_tokens=200, tools=[tool],
        tool_choice={"type": "function", "name": "look"},
        include=["message.output_text.logprobs"], top_logprobs=2,
    )  # fmt: skip
    *_, last = events
    assert last.type == "response.completed"
    assert {item.type for item in last.response.output} == {"function_call"}


def test_metrics_of_a_call(server: Running) -> None:
    """They have the reason that the engine gave, from a reply and from a stream alike."""
    body = {
        "model": "toy", "messages": TURNS, "max_tokens": 200, "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "stop"}},
    }  # fmt: skip
    with server.http() as client:
        before = samples(client)
        choice = post(server, CHAT, body)["choices"][0]
        streamed = of_chunks(post(server, CHAT, body | {"stream": True}))[0]
        assert choice["finish_reason"] == streamed["finish"] == "tool_calls"

        def counted() -> dict[str, float]:
            return {
                key[-1]: value - before.get(key, 0)
                for key, value in samples(client).items()
                if key[0] == "request_success_total" and value != before.get(key, 0)
            }

        until(lambda: sum(counted().values()) == 2)
        assert counted() == {"stop": 2}


def test_a_forced_call_that_was_cut(server: Running) -> None:
    """The call as far as its parser has read it, and "length": in a reply, in a stream, and as a
    response."""
    tool: Any = TOOLS[0]
    body = {
        "model": "toy", "messages": TURNS, "max_tokens": 60, "temperature": 0, "tools": [tool],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
    }  # fmt: skip
    reply = post(server, CHAT, body)["choices"][0]
    (call,) = reply["message"]["tool_calls"]
    assert (call["function"]["name"], reply["finish_reason"]) == ("look", "length")
    assert reply["message"]["content"] is None
    streamed, whole = of_chunks(post(server, CHAT, body | {"stream": True}))[0], of_choice(reply)
    # How far the parser reads depends on how many tokens a chunk has.
    ((name, told),), ((_, read),) = streamed.pop("calls"), whole.pop("calls")
    assert name == "look"
    assert told.startswith(read) or read.startswith(told)
    assert streamed == whole
    made = server.openai().responses.create(
        model="toy", input="12+7=", max_output_tokens=60, temperature=0,
        tools=[{"type": "function", **tool["function"]}],
        tool_choice={"type": "function", "name": "look"},
    )  # fmt: skip
    (item,) = made.output
    assert (item.type, made.status) == ("function_call", "incomplete")
    assert item.arguments == call["function"]["arguments"]


@pytest.mark.parametrize(
    ("text", "calls", "said"),
    [
        ('[{"name": "look", "parameters": {"place": "Ro', [("look", '{"place": "Ro')], ""),
        (
            '[{"name": "stop", "parameters": {}}, {"name": "look", "parameters": {"a": 1}',
            [("stop", "{}"), ("look", '{"a": 1}')],
            "",
        ),
        ('[{"name": "loo', [], '[{"name": "loo'),
        ("19 and", [], "19 and"),
    ],
)
def test_a_list_of_calls_that_was_cut(text: str, calls: Any, said: str) -> None:
    """A JSON list of calls, for a parser whose own form is not JSON."""
    from sgl_jax.srt.entrypoints.openai.protocol import Tool

    found, rest = cut_calls(text, [Tool(**one) for one in TOOLS], "qwen3_coder")
    assert [(call.function.name, call.function.arguments) for call in found] == calls
    assert rest == said


def test_a_token_is_named_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again in every later chunk, although each has all tokens so far."""
    named: list[int] = []
    monkeypatch.setattr(
        "enginepool.serve.openai_serving.token_name",
        lambda token: named.append(token) or f"n{token}",
    )
    body = {
        "model": "toy", "messages": TURNS, "max_tokens": 60, "ignore_eos": True, "logprobs": True,
        "return_tokens_as_token_ids": True, "return_token_ids": True, "stream": True,
    }  # fmt: skip
    made = of_chunks(post(server, CHAT, body))[0]
    assert made["tokens"] == [f"n{token}" for token in made["ids"]]
    assert named == made["ids"]


@pytest.mark.parametrize("error", [ValueError("broken"), RuntimeError("broken")])
@pytest.mark.parametrize("stream", [False, True])
def test_a_parser_that_fails(
    server: Running,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    stream: bool,
) -> None:
    """The last chunk is an error object. A reply is one, too. The log has one traceback."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    caplog.set_level("INFO", "enginepool")
    monkeypatch.setattr("enginepool.serve.chat_stream.Calls.of", fail)
    monkeypatch.setattr("enginepool.serve.openai_serving.cut_calls", fail)
    body = {
        "model": "toy", "messages": TURNS, "max_tokens": 1, "tools": TOOLS, "stream": stream,
        "return_token_ids": True,
    }  # fmt: skip
    with server.http() as client:
        reply = client.post(CHAT, json=body)
    told = reply.text
    if stream:
        *_, told, done = [line.removeprefix("data: ") for line in told.splitlines() if line]
        assert done == "[DONE]"
    assert reply.status_code == (200 if stream else 500)
    assert json.loads(told)["error"]["type"] == "server_error"
    assert "broken" not in told
    until(lambda: any(record.msg == "enginepool.request" for record in caplog.records))
    assert [r.msg for r in caplog.records].count("enginepool.internal_error") == 1


# Outputs of models: names and arguments of calls, after some text.
LOOK = ("look", {"place": "Rome", "days": 3})
STOP = ("stop", {})
ASK = ("ask", {"who": {"name": "Ann"}})
ASKED = {"type": "object", "properties": {"who": {"type": "object"}}}
ALL = [*TOOLS, {"type": "function", "function": {"name": "ask", "parameters": ASKED}}]


def as_json(*calls: tuple[str, dict[str, Any]]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )


def as_xml(*calls: tuple[str, dict[str, Any]]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def as_glm(*calls: tuple[str, dict[str, Any]]) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value if key == 'place' else json.dumps(value)}"
            "</arg_value>\n"
            for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def in_pieces(parser: Any, text: str, size: int) -> Iterator[Any]:
    for start in range(0, len(text), size):
        yield from parser.of(text[start : start + size], last=start + size >= len(text))


# A call of a tool that the request does not have, and one that is not JSON.
UNKNOWN = as_json(("nope", {"a": 1}))
BROKEN = "<tool_call>\n{a: 1}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "calls", "finish"),
    [
        (f"hello {UNKNOWN} so", [], "stop"),
        (f"hello {BROKEN} so", [], "stop"),
        (f"hello {UNKNOWN}\n{as_json(STOP)}", [STOP], "tool_calls"),
    ],
)
def test_what_is_no_call_is_text(server: Running, text: str, calls: Any, finish: str) -> None:
    body = {
        "model": "toy", "messages": TURNS, "max_tokens": 200, "tools": TOOLS,
        "regex": re.escape(text),
    }  # fmt: skip
    whole = of_choice(post(server, CHAT, body)["choices"][0])
    assert whole["calls"] == calls
    assert (whole["text"], whole["finish"]) == ("hello" if calls else text, finish)
    assert of_chunks(post(server, CHAT, body | {"stream": True}))[0] == whole


def test_a_stop_string_in_a_call(server: Running) -> None:
    """The call as far as it goes, as if `max_tokens` had cut it."""
    body = {
        "model": "toy", "messages": TURNS, "max_tokens": 200, "tools": TOOLS, "stop": "}}",
        "regex": re.escape(f"hello {as_json(LOOK)}"),
    }  # fmt: skip
    choice = post(server, CHAT, body)["choices"][0]
    whole = of_choice(choice)
    assert [name for name, _ in whole["calls"]] == ["look"]
    assert (whole["text"], whole["finish"]) == ("hello", "tool_calls")
    assert choice["matched_stop"] is None
    assert of_chunks(post(server, CHAT, body | {"stream": True}))[0] == whole


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 9, 13, 40, 1000])
@pytest.mark.parametrize(
    ("parser", "text", "said", "calls"),
    [
        ("qwen25", "hello " + as_json(LOOK, LOOK), "hello", [LOOK, LOOK]),
        ("qwen25", as_json(STOP), "", [STOP]),
        ("qwen25", as_json(STOP, LOOK, STOP), "", [STOP, LOOK, STOP]),
        ("qwen25", as_json(("look", {"place": "a</tool_call>\n", "days": [{"é": "}"}]})), "", None),
        ("qwen25", "a < b and <tool", "a < b and <tool", []),
        ("qwen25", "a <" + as_json(STOP), "a <", [STOP]),
        ("qwen25", "a" + as_json(LOOK) + UNKNOWN + as_json(STOP), "a", [LOOK, STOP]),
        ("qwen25", f"a {UNKNOWN} b", f"a {UNKNOWN} b", []),
        ("qwen3_coder", f"a {as_xml(('nope', {}))} b", f"a {as_xml(('nope', {}))} b", []),
        ("qwen3_coder", "the <tool_call> mark", "the <tool_call> mark", []),
        ("glm45", "a " + as_glm(("nope", {}), STOP), "a", [STOP]),
        ("qwen25", "", "", []),
        ("qwen3_coder", "hello " + as_xml(LOOK, LOOK), "hello", [LOOK, LOOK]),
        ("qwen3_coder", as_xml(STOP, LOOK, STOP) + "\n", "", [STOP, LOOK, STOP]),
        ("glm45", as_glm(ASK, STOP, LOOK), "", [ASK, STOP, LOOK]),
    ],
)
def test_calls_in_pieces(parser: str, text: str, said: str, calls: Any, size: int) -> None:
    """The same calls, after the same text. The arguments of a call come before what follows it."""
    from sgl_jax.srt.entrypoints.openai.protocol import Tool

    made: dict[int, list[str]] = {}
    content = ""
    current = None
    for delta in in_pieces(Calls([Tool(**one) for one in ALL], parser), text, size):
        content += delta.content or ""
        current = None if delta.content else current
        for call in delta.tool_calls or ():
            assert (call.id is not None) == (call.index not in made)
            current = current if call.id is None else call.index
            assert call.index == current
            whole = made.setdefault(call.index, ["", ""])
            whole[0] += call.function.name or ""
            whole[1] += call.function.arguments or ""
    assert content.strip() == said
    found = [(name, json.loads(arguments)) for name, arguments in made.values()]
    if calls is None:
        calls = [("look", {"place": "a</tool_call>\n", "days": [{"é": "}"}]})]
    assert found == calls


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9, 1000])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("parser", "text", "thought", "said"),
    [
        ("qwen3", "<think>a < b, so</think>19 < 20", "a < b, so", "19 < 20"),
        ("qwen3", "<think>cut in the mid<", "cut in the mid<", ""),
        ("qwen3", "<think>\n a, so</think>\n\n19 \n20", "a, so", "19 \n20"),
        ("deepseek-r1", "so</think>19<", "so", "19<"),
    ],
)
def test_reasoning_in_pieces(
    parser: str, text: str, thought: str, said: str, stream: bool, size: int
) -> None:
    assert reasoning_in_pieces(parser, text, stream, size) == (thought, said)


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("stream", [False, True])
def test_only_the_end_of_reasoning(stream: bool, size: int) -> None:
    """Some versions of upstream read the text before it as reasoning, others as an answer."""
    from sgl_jax.srt.reasoning_parser import ReasoningParser

    text = "so</think>19<"
    thought, said = ReasoningParser("qwen3", stream).parse_non_stream(text)
    assert reasoning_in_pieces("qwen3", text, stream, size) == (thought or "", said or "")


def reasoning_in_pieces(parser: str, text: str, stream: bool, size: int) -> tuple[str, str]:
    told = list(in_pieces(Reasoning(parser, stream=stream), text, size))
    return "".join(thought for thought, _ in told), "".join(said for _, said in told)


def test_long_arguments_are_not_parsed_again_for_every_piece() -> None:
    from sgl_jax.srt.entrypoints.openai.protocol import Tool

    calls = Calls([Tool(**one) for one in TOOLS], "qwen25")
    looked_at = 0
    increment = calls._parser.detector.parse_streaming_increment

    def counting(text: str, tools: Any) -> Any:
        nonlocal looked_at
        looked_at += len(calls._parser.detector._buffer) + len(text)
        return increment(text, tools)

    calls._parser.detector.parse_streaming_increment = counting  # type: ignore[method-assign]
    text = as_json(("look", {"place": "x y " * 4000, "days": 3}))
    deltas = list(in_pieces(calls, text, 4))
    assert len(deltas) > 20
    assert looked_at < 60 * len(text)
