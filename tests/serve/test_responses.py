"""`/v1/responses` by the `openai` package, whose types define a reply and an event."""

import json
from collections.abc import AsyncIterator
from itertools import chain
from typing import Any

import anyio
import openai
import pytest
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from enginepool import EnginePool
from enginepool.dispatch.request import Call, Request
from enginepool.dispatch.thinking import Thinking
from enginepool.serve.responses_input import as_chat
from enginepool.serve.responses_models import ResponsesBody
from enginepool.serve.responses_output import Answer, Events
from tests.support.liveness import paused
from tests.support.servers import Running, serving

SUM = "12+7="
EVENT: Any = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}


def test_a_reply(plain: Running) -> None:
    """The chat's answer, in a form that fits the client's types exactly."""
    client = plain.openai()
    made = client.responses.create(model="toy", input=SUM, temperature=0, metadata={"a": "b"})
    chat = client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": SUM}], temperature=0
    )
    assert made.output_text == chat.choices[0].message.content == "19"
    assert (made.status, made.id[:5], made.metadata) == ("completed", "resp_", {"a": "b"})
    assert made.usage is not None
    assert chat.usage is not None
    assert made.usage.input_tokens == chat.usage.prompt_tokens
    assert made.usage.output_tokens == chat.usage.completion_tokens == 3
    with plain.http() as http:
        raw = http.post("/v1/responses", json={"model": "toy", "input": SUM}).json()
    Response.model_validate(raw)


def test_a_conversation(plain: Running) -> None:
    """The input of the next turn is the conversation so far, with replies as they came."""
    client = plain.openai()
    first = client.responses.create(model="toy", input=SUM, temperature=0, instructions="Add.")
    items: Any = [
        {"role": "user", "content": SUM},
        *first.output,
        {"role": "user", "content": [{"type": "input_text", "text": "30+4="}]},
    ]
    second = client.responses.create(model="toy", input=items, temperature=0, instructions="Add.")
    messages: Any = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": SUM},
        {"role": "assistant", "content": "19"},
        {"role": "user", "content": "30+4="},
    ]
    chat = client.chat.completions.create(model="toy", messages=messages, temperature=0)
    assert second.output_text == chat.choices[0].message.content
    assert second.usage is not None
    assert chat.usage is not None
    assert second.usage.input_tokens == chat.usage.prompt_tokens


def test_items_of_an_agent() -> None:
    """Calls, their outputs and reasoning become messages that a chat template knows."""
    body = ResponsesBody.model_validate(
        {
            "model": "m",
            "tools": [TOOL],
            "tool_choice": {"type": "function", "name": "add"},
            "input": [
                {"role": "developer", "content": "Add."},
                {"role": "user", "content": "1+1?"},
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "hm"}],
                },
                {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
                {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "2"},
                {
                    "type": "function_call_output",
                    "call_id": "c2",
                    "output": [{"type": "input_text", "text": "3"}],
                },
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "2", "annotations": []}],
                },
            ],
        }
    )
    made = as_chat(body)
    messages = [message.model_dump(exclude_none=True) for message in made.messages]
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert messages == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+1?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", **call}, {"id": "c2", **call}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "3"},
        {"role": "assistant", "content": "2"},
    ]
    assert made.tools is not None
    assert made.tools[0].function.name == "add"
    choice: Any = made.tool_choice
    assert choice.function.name == "add"


def test_a_stream(plain: Running) -> None:
    """Every event has one of the client's types and a number. Together they make up the reply."""
    client = plain.openai()
    with client.responses.stream(model="toy", input=SUM, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    middle = [kind for kind in kinds[4:-4] if kind != "response.output_text.delta"]
    assert middle == []
    assert [*kinds[:4], *kinds[-4:]] == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
        *("response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.completed"),
    ]
    assert final.output_text == "19"
    assert final.usage is not None
    assert final.usage.output_tokens == 3
    body = {"model": "toy", "input": SUM, "stream": True}
    with plain.http() as http:
        reply = http.post("/v1/responses", json=body)
    for line in reply.text.splitlines():
        if line.startswith("data: "):
            EVENT.validate_python(json.loads(line[6:]))


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(plain: Running, stream: bool) -> None:
    """They are the chat's."""
    client = plain.openai()
    chat = client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": SUM}], temperature=0, logprobs=True,
        top_logprobs=2,
    )  # fmt: skip
    asked: dict[str, Any] = {
        "model": "toy", "input": SUM, "temperature": 0, "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    }  # fmt: skip
    if stream:
        with client.responses.stream(**asked) as events:
            made: Any = events.get_final_response()
    else:
        made = client.responses.create(**asked)
    assert chat.choices[0].logprobs is not None
    expected = chat.choices[0].logprobs.content or []
    (part,) = made.output[0].content
    assert [place.token for place in part.logprobs] == [place.token for place in expected]
    for place, other in zip(part.logprobs, expected, strict=True):
        assert place.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [top.token for top in place.top_logprobs] == [t.token for t in other.top_logprobs]


@pytest.mark.parametrize("stream", [False, True])
def test_cut_by_its_length(plain: Running, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "toy", "input": SUM, "temperature": 0, "max_output_tokens": 1}
    made: Any = plain.openai().responses.create(**asked, stream=stream)
    if stream:
        *_, last = made
        assert last.type == "response.incomplete"
        made = last.response
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert made.output[0].status == "incomplete"
    assert made.output_text == "1"


def test_cut_by_an_abort(one_sum: EnginePool) -> None:
    """The stream reports that the response failed, and `openai` raises."""
    with serving(one_sum, enable_admin=True) as running:
        events = running.openai().responses.create(
            model="toy", input=SUM, stream=True, max_output_tokens=480,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        seen: list[Any] = [next(events)]
        with paused(one_sum):
            running.http().post("/abort_request", json={"abort_all": True})
            with pytest.raises(openai.APIError, match="abort") as caught:
                seen.extend(events)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["code"] == "aborted"


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"previous_response_id": "resp_1"}, "keeps no responses"),
        ({"store": True}, "keeps no responses"),
        ({"background": True}, "keeps no responses"),
        ({"conversation": {"id": "c"}}, "keeps no responses"),
        ({"reasoning": {"effort": "low"}}, "unknown field reasoning"),
        ({"max_tokens": 5}, "max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens=0"),
        ({"top_logprobs": 2}, "without include"),
        ({"truncation": "auto", "input": "1" * 2000}, "too many"),
        ({"include": ["reasoning.encrypted_content"]}, "reasoning.encrypted_content"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type='web_search'"),
        ({"tools": [TOOL]}, "--tool-call-parser"),
        ({"tool_choice": "required"}, "tool_choice without tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "needs name and schema"),
        ({"text": {"verbosity": "low"}}, "verbosity"),
        ({"input": []}, "no message"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "expected an item of type"),
        ({"input": [{"type": ["message"]}]}, "expected an item of type"),
        ({"input": [1]}, "expected an item of type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"input": "1" * 2000}, "too many"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_unsupported_fields_are_refused(plain: Running, body: dict[str, Any], part: str) -> None:
    with plain.http() as client:
        reply = client.post("/v1/responses", json={"model": "toy", "input": SUM, **body})
    assert reply.status_code == 400, reply.text
    assert part in reply.json()["error"]["message"]


def test_embeddings_are_refused_with_a_reason(plain: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="generate and score"):
        plain.openai().embeddings.create(model="toy", input=SUM)


def test_log_probabilities_before_a_call() -> None:
    """A message has those of its own tokens. The mark of a call may be spelt with any tokens."""
    body = ResponsesBody.model_validate({"model": "m", "input": "1+1?", "tools": [TOOL]})
    call = Call()
    call.requests.append(Request(call, [1, 2], sampling=None, rid="resp_1"))
    tokens = ["I", " add.", "\n<", "tool", "_call", ">", "{}", "</tool_call>"]
    logprobs = [{"token": token, "logprob": -1.0, "top_logprobs": []} for token in tokens]
    called = {"id": "c1", "function": {"name": "add", "arguments": "{}"}}
    message = {"content": "I add.", "reasoning_content": None, "tool_calls": [called]}
    choice = {"message": message, "logprobs": {"content": logprobs}}
    made = Answer(body, as_chat(body), call, len).whole({"choices": [choice]})
    (part,) = made["output"][0]["content"]
    assert [one["token"] for one in part["logprobs"]] == ["I", " add."]


def test_tools_and_reasoning_in_a_stream() -> None:
    """Items come in the order of the chat's chunks, and the client puts them together."""
    body = ResponsesBody.model_validate({"model": "m", "input": "1+1?", "tools": [TOOL]})
    call = Call()
    request = Request(call, [1, 2], sampling=None, rid="resp_1")
    request.output_ids, request.finish_reason = [1] * 9, {"type": "stop"}
    call.requests.append(request)

    def chunk(**delta: Any) -> str:
        choice = {"index": 0, "delta": {"role": None, **delta}, "logprobs": None}
        return f"data: {json.dumps({'choices': [choice]})}\n\n"

    def called(id: str | None, arguments: str) -> dict[str, Any]:
        name = None if id is None else "add"
        return {"tool_calls": [{"id": id, "function": {"name": name, "arguments": arguments}}]}

    async def chunks() -> AsyncIterator[str]:
        yield chunk(role="assistant", content="")
        for delta in (
            *({"reasoning_content": "let "}, {"reasoning_content": "me"}, {"content": "I add."}),
            *(called("c1", ""), called(None, '{"a"'), called(None, ": 1}")),
            called("c2", "{}"),
        ):
            yield chunk(**delta)
        yield "data: [DONE]\n\n"

    async def read() -> list[Any]:
        made = Events(Answer(body, as_chat(body), call, len)).of(chunks())
        lines = [piece.splitlines() async for piece in made]
        return [EVENT.validate_python(json.loads(data[6:])) for _, data, *_ in lines]

    events = anyio.run(read)
    state: Any = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    seen = list(chain.from_iterable(state.handle_event(event) for event in events))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = seen[-1].response
    assert [item.type for item in done.output] == [
        *("reasoning", "message", "function_call", "function_call"),
    ]
    thought, said, first, second = done.output
    assert thought.content[0].text == "let me"
    assert said.content[0].text == "I add."
    assert (first.call_id, first.name, first.arguments) == ("c1", "add", '{"a": 1}')
    assert (second.call_id, second.arguments) == ("c2", "{}")
    assert {item.status for item in done.output} == {"completed"}
    assert done.usage.output_tokens_details.reasoning_tokens == len("let me")


def test_a_message_without_text_in_a_stream() -> None:
    """It has the log-probability of the end token, as a whole reply has, also after thinking."""
    body = ResponsesBody.model_validate({"model": "m", "input": "1+1?"})
    call = Call()
    request = Request(call, [1, 2], sampling=None, rid="resp_1")
    request.thinking = Thinking((5,), "</t>", True, str)
    request.output_ids, request.finish_reason = [6, 7], {"type": "stop"}
    call.requests.append(request)
    logprobs = [{"token": token, "logprob": -1.0} for token in ("</t>", "<end>")]
    message = {"content": None, "tool_calls": None, "reasoning_content": None}
    choice = {"delta": message, "message": message, "logprobs": {"content": logprobs}}

    async def read() -> list[Any]:
        async def chunks() -> AsyncIterator[str]:
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"

        made = Events(Answer(body, as_chat(body), call, len)).of(chunks())
        return [json.loads(piece.splitlines()[1][6:]) async for piece in made]

    ended = anyio.run(read)[-1]["response"]
    expected = Answer(body, as_chat(body), call, len).whole({"choices": [choice]})
    for made in (ended, expected):
        (part,) = made["output"][0]["content"]
        assert [one["token"] for one in part["logprobs"]] == ["<end>"]
