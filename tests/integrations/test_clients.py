"""Clients of OpenAI's routes as their users call them: answers, streams, tools, structured output,
errors.

Skipped where they are not installed. tests/serve has the newest `openai`. Here it is the version
that the other clients work with.
"""

import os
from asyncio import Runner
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.support.pools import MakePool
from tests.support.servers import Running, serving

# Otherwise it asks a host for prices when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LANGSMITH_TRACING"] = "false"

instructor: Any = pytest.importorskip("instructor")
langchain_openai: Any = pytest.importorskip("langchain_openai")
litellm: Any = pytest.importorskip("litellm")

SUM: Any = [{"role": "user", "content": "12+7="}]
USAGE = (24, 3)  # of SUM and its answer, in tokens
TOO_LONG: Any = [{"role": "user", "content": "9" * 3000}]


class Answer(BaseModel, extra="forbid"):
    """A sum. With additional properties allowed, the toy would invent them without end."""

    total: int = Field(ge=0, le=99)
    sign: Literal["plus", "minus"]
    notes: list[Literal["a", "b"]] = Field(max_length=2)


class Look(BaseModel, extra="forbid"):
    """Look something up."""

    place: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


@pytest.fixture(scope="module")
def running(make_pool: MakePool) -> Iterator[Running]:
    """One engine with room for the schemas that clients write into a prompt."""
    options: dict[str, Any] = {"context_length": 1024, "max_total_tokens": 2048}
    pool = make_pool(
        "toy", 1, tool_call_parser="qwen25", constrained_json_disable_any_whitespace=True, **options
    )
    with serving(pool) as running:
        yield running


@pytest.fixture(scope="module")
def loop() -> Iterator[Runner]:
    """One event loop for all clients, because they keep their connections."""
    with Runner() as runner:
        yield runner


def usage(of: Any) -> tuple[int, int]:
    return of.prompt_tokens, of.completion_tokens


# openai


def test_openai(running: Running) -> None:
    client = running.openai()
    (card,) = client.models.list().data
    options: dict[str, Any] = {"model": card.id, "messages": SUM, "temperature": 0}
    made = client.chat.completions.create(**options)
    assert made.choices[0].message.content == "19"
    assert usage(made.usage) == USAGE
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**options, **asked))
    texts = [c.delta.content for chunk in chunks for c in chunk.choices if c.delta.content]
    assert "".join(texts) == "19"
    assert usage(chunks[-1].usage) == USAGE
    assert client.responses.create(model=card.id, input=SUM, temperature=0).output_text == "19"
    made = client.completions.create(model=card.id, prompt="12+7=", temperature=0)
    assert made.choices[0].text == "19"
    with pytest.raises(openai.BadRequestError, match="too many"):
        client.chat.completions.create(**(options | {"messages": TOO_LONG}))
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=card.id, input="12+7=")


def test_openai_parse(running: Running) -> None:
    client = running.openai()
    options: dict[str, Any] = {"model": "toy", "messages": SUM, "seed": 1, "temperature": 1.0}
    made = client.chat.completions.parse(**options, response_format=Answer, max_tokens=100)
    assert isinstance(made.choices[0].message.parsed, Answer)
    tools: Any = [openai.pydantic_function_tool(Look)]
    made = client.chat.completions.parse(
        **options, tools=tools, tool_choice="required", max_tokens=400
    )
    for call in made.choices[0].message.tool_calls or [None]:
        assert call is not None
        assert isinstance(call.function.parsed_arguments, Look)
    with client.chat.completions.stream(
        **options, response_format=Answer, max_tokens=100
    ) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Answer)
    assert {"content.delta", "content.done"} <= kinds


# LangChain


@pytest.fixture
def chat(running: Running) -> Any:
    return langchain_openai.ChatOpenAI(
        model="toy", base_url=f"{running.url()}/v1", api_key="none", temperature=0, max_retries=0
    )


def test_langchain(chat: Any, loop: Runner) -> None:
    """Single answers, several at once, in chunks and from a coroutine, with usage and
    probabilities."""
    from langchain_core.messages import HumanMessage, SystemMessage

    said = chat.invoke("12+7=")
    assert said.content == "19"
    assert said.response_metadata["finish_reason"] == "stop"
    counted = said.usage_metadata
    assert (counted["input_tokens"], counted["output_tokens"]) == USAGE
    parts = HumanMessage([{"type": "text", "text": "12+"}, {"type": "text", "text": "7="}])
    assert chat.invoke([parts]).content
    assert chat.invoke([SystemMessage("Add."), HumanMessage("12+7=")]).content
    sums = ["12+7=", "30+4=", "21+13=", "44+5="]
    assert [one.content for one in chat.batch(sums)] == ["19", "34", "34", "49"]
    whole = None
    for chunk in chat.stream("12+7=", stream_usage=True):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.content == "19"
    assert whole.usage_metadata["output_tokens"] == USAGE[1]
    assert loop.run(chat.ainvoke("30+4=")).content == "34"
    said = chat.bind(logprobs=True, top_logprobs=2, stop=["9"]).invoke("12+7=")
    assert said.content == "1"
    assert [one["token"] for one in said.response_metadata["logprobs"]["content"]] == ["1", "9"]
    with pytest.raises(openai.BadRequestError, match="too many"):
        chat.invoke("9" * 3000)


def test_langchain_responses(running: Running) -> None:
    chat = langchain_openai.ChatOpenAI(
        model="toy", base_url=f"{running.url()}/v1", api_key="none", use_responses_api=True,
        temperature=0, max_retries=0,
    )  # fmt: skip
    assert chat.invoke("12+7=").text == "19"
    assert "".join(chunk.text for chunk in chat.stream("12+7=")) == "19"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("strict", [None, True])
def test_langchain_structured(chat: Any, loop: Runner, method: str, strict: bool | None) -> None:
    free = chat.model_copy(update={"temperature": 1.0, "seed": 3, "max_tokens": 200})
    made = free.with_structured_output(Answer, method=method, strict=strict, include_raw=True)
    for result in (made.invoke("12+7="), loop.run(made.ainvoke("12+7="))):
        assert result["parsing_error"] is None
        assert isinstance(result["parsed"], Answer)
    *_, last = free.with_structured_output(Answer, method=method).stream("12+7=")
    assert isinstance(last, Answer)


def test_langchain_tools(chat: Any) -> None:
    """A forced call, its result sent back, and a call that the model may leave out."""
    from langchain_core.messages import HumanMessage, ToolMessage

    free = chat.model_copy(update={"temperature": 1.0, "seed": 3, "max_tokens": 400})
    for choice, several in (("any", True), ("any", False), ("Look", True)):
        options = {} if several else {"parallel_tool_calls": False}
        said = free.bind_tools([Look], tool_choice=choice, **options).invoke("12+7=")
        assert len(said.tool_calls) == 1 or (choice == "any" and several and said.tool_calls)
        for call in said.tool_calls:
            assert call["name"] == "Look"
            Look.model_validate(call["args"])
        assert not said.invalid_tool_calls
    results = [ToolMessage("sunny", tool_call_id=call["id"]) for call in said.tool_calls]
    again = chat.bind_tools([Look], tool_choice="none")
    assert again.invoke([HumanMessage("12+7="), said, *results]).content
    assert chat.bind_tools([Look]).invoke("12+7=").content.startswith("19")


# instructor


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor(running: Running, mode: str) -> None:
    client = instructor.from_openai(running.openai(), mode=instructor.Mode[mode])
    limit = {"max_output_tokens": 300} if mode == "RESPONSES_TOOLS" else {"max_tokens": 300}
    made, raw = client.chat.completions.create_with_completion(
        model="toy", messages=SUM, response_model=Answer, max_retries=0, temperature=1.0, **limit
    )
    assert isinstance(made, Answer)
    assert raw.usage is not None


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor_streams(running: Running, mode: str) -> None:
    """An object whose fields come one after the other."""
    client = instructor.from_openai(running.openai(), mode=instructor.Mode[mode])
    options: dict[str, Any] = {"model": "toy", "messages": SUM, "temperature": 1.0, "seed": 2}
    partial = list(client.create_partial(response_model=Answer, max_tokens=300, **options))
    assert len(partial) > 1
    Answer.model_validate(partial[-1].model_dump())


def test_instructor_raises_the_servers_error(running: Running) -> None:
    client = instructor.from_openai(running.openai(), mode=instructor.Mode.TOOLS)
    with pytest.raises(Exception, match="too many"):
        client.create(model="toy", messages=TOO_LONG, response_model=Answer, max_retries=0)


# LiteLLM. For tools it imports mcp, which is not among its dependencies.


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(running: Running, loop: Runner, provider: str) -> None:
    where = {"api_base": f"{running.url()}/v1", "api_key": "none", "max_retries": 0}
    options: dict[str, Any] = {"model": f"{provider}/toy", "messages": SUM, **where}
    made = litellm.completion(**options, temperature=0)
    assert made.choices[0].message.content == "19"
    assert usage(made.usage) == USAGE
    chunks = litellm.completion(
        **options, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    built = litellm.stream_chunk_builder(list(chunks), messages=SUM)
    assert built.choices[0].message.content == "19"
    assert usage(built.usage) == USAGE
    made = litellm.completion(**options, response_format=Answer, max_tokens=100, seed=1)
    Answer.model_validate_json(made.choices[0].message.content)
    made = loop.run(litellm.acompletion(**options, temperature=0, logprobs=True))
    assert [one.token for one in made.choices[0].logprobs.content][:2] == ["1", "9"]
    with pytest.raises(litellm.BadRequestError, match="too many"):
        litellm.completion(**(options | {"messages": TOO_LONG}))


def test_litellm_tools(running: Running) -> None:
    """Calls that must be made, whole and in a stream, and their results sent back.

    (As `hosted_vllm/…` it removes `additionalProperties` from a tool, and the toy would invent
    properties without end.)
    """
    where = {"api_base": f"{running.url()}/v1", "api_key": "none", "max_retries": 0}
    options: dict[str, Any] = {
        "model": "openai/toy",
        "tools": [openai.pydantic_function_tool(Look)],
        **where,
    }
    asked = options | {"messages": SUM, "temperature": 1.0, "seed": 3, "max_tokens": 400}
    for choice in ("required", {"type": "function", "function": {"name": "Look"}}):
        made = litellm.completion(**asked, tool_choice=choice)
        chunks = list(litellm.completion(**asked, tool_choice=choice, stream=True))
        built = litellm.stream_chunk_builder(chunks, messages=SUM)
        whole, streamed = (
            [(call.function.name, call.function.arguments) for call in one.message.tool_calls]
            for one in (made.choices[0], built.choices[0])
        )
        assert whole == streamed
        for name, arguments in whole:
            assert name == "Look"
            Look.model_validate_json(arguments)
        for one in (made, built):
            assert one.choices[0].finish_reason == "tool_calls"
    answer = made.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in answer.tool_calls
    ]
    turns = [*SUM, answer.model_dump(exclude_none=True), *results]
    made = litellm.completion(**options, messages=turns, tool_choice="none", max_tokens=20)
    assert made.choices[0].message.content


def test_litellm_text(running: Running) -> None:
    made = litellm.text_completion(
        model="text-completion-openai/toy", prompt="12+7=", temperature=0,
        api_base=f"{running.url()}/v1", api_key="none",
    )  # fmt: skip
    assert made.choices[0].text == "19"
