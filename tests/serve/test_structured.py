"""Structured output over HTTP, as clients ask for it."""

import json
import re
import socket
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from enginepool.frontend import grammar_compiler
from enginepool.frontend.grammar_compiler import GrammarCompiler
from enginepool.frontend.grammar_helper import NobodyWaits
from tests.support.grammars import without_end
from tests.support.liveness import SECONDS, until
from tests.support.pools import MakePool
from tests.support.servers import Running, serving

TURNS: Any = [{"role": "user", "content": "12+7="}]
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
TOKENS = "/inference/v1/generate"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "toy", "messages": TURNS, "max_tokens": 100, "seed": 5},
    COMPLETIONS: {"model": "toy", "prompt": "12+7=", "max_tokens": 100, "seed": 5},
    GENERATE: {"text": "12+7=", "sampling_params": {"max_new_tokens": 100, "temperature": 0}},
    TOKENS: {"token_ids": [49, 43], "sampling_params": {"max_tokens": 100, "seed": 5}},
}


class Answer(BaseModel):
    """Its properties have an order that is not alphabetical."""

    total: int = Field(ge=0, le=99)
    sign: Literal["plus", "minus"]
    notes: list[Literal["a", "b"]] = Field(max_length=2)


class Look(BaseModel):
    """Look something up."""

    place: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


class Wait(BaseModel):
    """Do nothing."""

    seconds: int = Field(ge=0, le=60)


@pytest.fixture(scope="module")
def server(make_pool: MakePool) -> Iterator[Running]:
    pool = make_pool(
        "toy", 1, tool_call_parser="qwen25", constrained_json_disable_any_whitespace=True
    )
    with serving(pool) as running:
        yield running


def post(server: Running, path: str, **fields: Any) -> dict[str, Any]:
    with server.http() as client:
        reply = client.post(path, json=BODIES[path] | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_openai_parse(server: Running) -> None:
    """The client's own model comes back, with its properties in order."""
    client = server.openai()
    options: dict[str, Any] = {"model": "toy", "messages": TURNS, "response_format": Answer}
    made = client.chat.completions.parse(**options, n=4, seed=1, temperature=1.0, max_tokens=100)
    for choice in made.choices:
        assert isinstance(choice.message.parsed, Answer)
        assert list(json.loads(choice.message.content or "")) == ["total", "sign", "notes"]
        assert choice.finish_reason == "stop"
    with client.chat.completions.stream(**options, seed=1, max_tokens=100) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Answer)


def test_json_object(server: Running) -> None:
    """Any object. A model that never saw one may not end it."""
    made = post(server, CHAT, response_format={"type": "json_object"}, temperature=1.0, n=8)
    for choice in made["choices"]:
        text = choice["message"]["content"]
        assert text.startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)


def test_responses(server: Running) -> None:
    """`/v1/responses` has its own fields for a form and for a call."""
    client = server.openai()
    options: dict[str, Any] = {"model": "toy", "input": "12+7=", "temperature": 1.0}
    options |= {"max_output_tokens": 400, "extra_body": {"seed": 3}}
    made = client.responses.parse(**options, text_format=Answer)
    assert isinstance(made.output_parsed, Answer)
    assert list(json.loads(made.output_text)) == ["total", "sign", "notes"]
    schema = Look.model_json_schema() | {"additionalProperties": False}
    tool: Any = {"type": "function", "name": "Look", "parameters": schema}
    called = client.responses.create(**options, tools=[tool], tool_choice="required")
    assert called.output
    for item in called.output:
        assert item.type == "function_call"
        assert item.name == "Look"
        Look.model_validate_json(item.arguments)


TOOLS: Any = [openai.pydantic_function_tool(Look), openai.pydantic_function_tool(Wait)]
KNOWN = {"Look": Look, "Wait": Wait}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Wait"}}])
def test_a_tool_must_be_called(server: Running, choice: Any) -> None:
    """The calls fit the client's own models and the form in which the model writes them, whole
    and in a stream."""
    client = server.openai()
    options: dict[str, Any] = {"model": "toy", "messages": TURNS, "tools": TOOLS}
    options |= {"tool_choice": choice, "temperature": 1.0, "max_tokens": 400}
    called = set()
    for seed in range(2):
        made = client.chat.completions.parse(**options, seed=seed)
        answer = made.choices[0]
        assert answer.finish_reason == "tool_calls"
        calls = answer.message.tool_calls or []
        assert len(calls) == 1 if choice != "required" else calls
        for call in calls:
            assert isinstance(call.function.parsed_arguments, KNOWN[call.function.name])
            called.add(call.function.name)
        names: dict[int, str] = {}
        arguments: dict[int, str] = {}
        for chunk in client.chat.completions.create(**options, seed=seed, stream=True):
            for part in chunk.choices[0].delta.tool_calls or ():
                assert part.function is not None
                names.setdefault(part.index, part.function.name or "")
                arguments[part.index] = arguments.get(part.index, "") + (
                    part.function.arguments or ""
                )
        assert list(names.values()) == [call.function.name for call in calls]
        assert [json.loads(text) for text in arguments.values()] == [
            json.loads(call.function.arguments) for call in calls
        ]
    assert called == {"Wait"} if choice != "required" else called <= set(KNOWN)


ANSWER: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "Answer",
        "schema": {**Answer.model_json_schema(), "additionalProperties": False},
    },
}


def spoken(choice: dict[str, Any]) -> list[str]:
    """The names of the tools that an answer calls. If it calls none, it must be an Answer."""
    calls = choice["message"]["tool_calls"] or []
    for call in calls:
        KNOWN[call["function"]["name"]].model_validate_json(call["function"]["arguments"])
    if not calls:
        Answer.model_validate_json(choice["message"]["content"])
    return [call["function"]["name"] for call in calls]


def test_one_call(server: Running) -> None:
    """LangChain asks for it like this."""
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "temperature": 1.0}
    options |= {"parallel_tool_calls": False, "max_tokens": 400}
    for choice in post(server, CHAT, **options, n=8)["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        assert len(spoken(choice)) == 1
    tool = {"type": "function", **TOOLS[0]["function"]}
    made = server.openai().responses.create(
        model="toy", input="12+7=", tools=[tool], tool_choice="required",
        parallel_tool_calls=False, max_output_tokens=400,
    )  # fmt: skip
    assert [item.type for item in made.output] == ["function_call"]
    assert made.parallel_tool_calls is False


def test_a_form_beside_tools(server: Running) -> None:
    """It is the form of text. A call that must be made is a call, as instructor sends both. If
    the model chooses, it gives one or the other."""
    options: dict[str, Any] = {"tools": TOOLS, "response_format": ANSWER, "max_tokens": 400}
    for tool_choice in ("required", {"type": "function", "function": {"name": "Wait"}}):
        made = post(server, CHAT, **options, tool_choice=tool_choice, temperature=1.0)
        assert spoken(made["choices"][0])
    made = post(server, CHAT, **options, temperature=1.0, n=8)
    said = [spoken(choice) for choice in made["choices"]]
    assert [] in said
    assert any(said)
    asked = {**options, "parallel_tool_calls": False}
    for choice in post(server, CHAT, **asked, temperature=1.0, n=8)["choices"]:
        assert len(spoken(choice)) < 2


def test_strict_tools(server: Running) -> None:
    """The model may also write text, which is free until a call begins."""
    made = post(server, CHAT, tools=TOOLS, temperature=0)
    assert made["choices"][0]["message"]["content"].startswith("19")


LETTERS = "[ab]{3}-[ab]{3}"


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, {"regex": LETTERS}, LETTERS),
        (CHAT, {"ebnf": 'root ::= "x" [ab]+ "y"', "temperature": 1}, "x[ab]+y"),
        (CHAT, {"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        (CHAT, {"structured_outputs": {"choice": ["a+", "(b\n", "-|"]}}, r"a\+|\(b\n|-\|"),
        (CHAT, {"structured_outputs": {"choice": [f"{i}!" for i in range(5000)]}}, r"\d{1,4}!"),
        (COMPLETIONS, {"regex": LETTERS}, LETTERS),
        (COMPLETIONS, {"json_schema": '{"enum": [1, "b"]}'}, '1|"b"'),
        (COMPLETIONS, {"structured_outputs": {"regex": LETTERS}}, LETTERS),
        (COMPLETIONS, {"structured_outputs": {"json": {"const": 3}}}, "3"),
        (GENERATE, {"regex": LETTERS}, LETTERS),
        (GENERATE, {"json_schema": {"enum": [1, "b"]}}, '1|"b"'),
        (GENERATE, {"ebnf": 'root ::= "x" [ab] "y"'}, "x[ab]y"),
        (TOKENS, {"structured_outputs": {"regex": LETTERS}}, LETTERS),
        (TOKENS, {"structured_outputs": {"grammar": 'start: "x" "y"'}}, "xy"),
    ],
)
def test_every_route(server: Running, path: str, fields: dict[str, Any], expected: str) -> None:
    if path in (GENERATE, TOKENS):
        fields = {"sampling_params": BODIES[path]["sampling_params"] | fields}
    made = post(server, path, **fields)
    if path == GENERATE:
        text = made["text"]
    elif path == TOKENS:
        text = bytes(made["choices"][0]["token_ids"][:-1]).decode()
    else:
        choice = made["choices"][0]
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    assert re.fullmatch(expected, text)


JSON = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nope"}}}


@pytest.mark.parametrize(
    ("path", "fields", "part"),
    [
        (CHAT, {"response_format": JSON}, "nope"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "json_schema.schema"),
        (CHAT, {"response_format": {"type": "json_object"}, "regex": "a"}, "response_format"),
        (CHAT, {"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_new_tokens"),
        (CHAT, {"regex": "a", "tools": TOOLS}, "tools"),
        (CHAT, {"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls"),
        (CHAT, {"regex": "("}, "unclosed group"),
        (CHAT, {"structured_outputs": {"regex": "a", "grammar": "b"}}, "exactly one"),
        (
            CHAT,
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "Fly"}}},
            "Fly",
        ),
        (COMPLETIONS, {"ebnf": "root ::= x"}, "ebnf"),
        (GENERATE, {"sampling_params": {"regex": "["}}, "regex="),
        (TOKENS, {"sampling_params": {"structured_outputs": {"regex": "["}}}, "regex="),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_forms(
    server: Running, path: str, fields: dict[str, Any], part: str, stream: bool
) -> None:
    """400, before a stream begins. The next request is answered."""
    with server.http() as client:
        reply = client.post(path, json=BODIES[path] | fields | {"stream": stream})
        assert reply.status_code == 400, reply.text
        assert part in reply.json()["error"]["message"]
    made = post(server, GENERATE)
    assert made["text"] == "19"


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_a_client_that_leaves_takes_its_grammar_along(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A compilation that nobody waits for is ended, however long it may take."""
    monkeypatch.setattr(grammar_compiler, "_SHORT_SECONDS", 1000.0)
    processor = server.server.pool.runtime.input_processor
    compiler = GrammarCompiler(processor.tokenizer, processor.limits.vocab_size, {}, "left")
    monkeypatch.setattr(processor, "grammars", compiler)
    form = {"ebnf": without_end()}
    fields = {"sampling_params": form} if path == GENERATE else form
    content = json.dumps(BODIES[path] | fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    try:
        with socket.create_connection(("127.0.0.1", server.server.port)) as client:
            client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            until(lambda: compiler.jobs)
            (job,) = compiler.jobs.values()
        assert isinstance(job.done.exception(SECONDS), NobodyWaits)
        assert post(server, GENERATE, sampling_params={"regex": "[ab]{3}"})["text"]
    finally:
        compiler.close()
