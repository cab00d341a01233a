"""A field that would be ignored is an error, in every route; and says what would help."""

from typing import Any

import openai
import pytest

from enginepool import EnginePool
from tests.support.servers import Running

SUM = "12+7="
TURNS: Any = [{"role": "user", "content": SUM}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "toy", "messages": TURNS, "temperature": 0},
    COMPLETIONS: {"model": "toy", "prompt": SUM, "temperature": 0},
    GENERATE: {"text": SUM, "sampling_params": {"temperature": 0}},
}
IGNORED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"function_call": "auto"}, "function_call"),
    (CHAT, {"prediction": {"type": "content", "content": "x"}}, "prediction"),
    (CHAT, {"audio": {"voice": "x"}}, "audio"),
    (CHAT, {"modalities": ["audio"]}, "modalities"),
    (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
    (CHAT, {"store": True}, "store"),
    (CHAT, {"top_logprobs": 3}, "logprobs"),
    (CHAT, {"return_hidden_states": True}, "return_hidden_states"),
    (CHAT, {"session_params": {"id": "1"}}, "session_params"),
    (CHAT, {"parallel_tool_calls": False}, "parallel_tool_calls"),
    (CHAT, {"temprature": 0}, "did you mean temperature"),
    (CHAT, {"tool_choice": "required"}, "tools"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"tools": [TOOL]}, "--tool-call-parser"),
    (COMPLETIONS, {"prediction": {"type": "content"}}, "prediction"),
    (COMPLETIONS, {"return_hidden_states": True}, "return_hidden_states"),
    (COMPLETIONS, {"session_params": {"id": "1"}}, "session_params"),
    (COMPLETIONS, {"messages": TURNS}, "messages"),
    (COMPLETIONS, {"response_format": {"type": "json_object"}}, "response_format"),
    (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt_logprobs": 1, "echo": True, "logprobs": 1}, "prompt_logprobs"),
    (COMPLETIONS, {"priority": 1}, "priority"),
    (COMPLETIONS, {"cache_salt": "a", "extra_key": "b"}, "extra_key"),
    (GENERATE, {"logprob_start_len": 0}, "return_logprob"),
    (
        GENERATE,
        {"text": [SUM, SUM], "return_logprob": True, "logprob_start_len": [-1, 0]},
        "for every prompt",
    ),
    (GENERATE, {"return_logprob": True, "token_ids_logprob": [5] * 65}, "token_ids_logprob"),
    (CHAT, {"token_ids_logprob": [5]}, "token_ids_logprob"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
    (GENERATE, {"temperature": 0}, "temperature"),
    (GENERATE, {"text": "1" * 99, "extra_key": ["a", "b"]}, "one value for all"),
    (GENERATE, {"extra_key": "k" * 1025}, "1025 characters"),
    (CHAT, {"model": "m" * 1025}, "1025 characters"),
    (CHAT, {"stop": ["ab"] * 257}, "257 strings"),
    (COMPLETIONS, {"stop": "s" * 4097}, "4097 characters"),
    (GENERATE, {"return_hidden_states": True}, "return_hidden_states"),
    (GENERATE, {"session_params": {"id": "1"}}, "session_params"),
    (GENERATE, {"dp_rank": 1}, "dp_rank"),
    (GENERATE, {"bootstrap_room": 5}, "bootstrap_room"),
    (GENERATE, {"lora_id": "x"}, "lora_id"),
    (GENERATE, {"batch_size": 7}, "batch_size"),
    (GENERATE, {"strean": True}, "did you mean stream"),
]


@pytest.mark.parametrize(("path", "field", "part"), IGNORED)
def test_what_would_be_ignored(plain: Running, path: str, field: dict[str, Any], part: str) -> None:
    with plain.http() as client:
        reply = client.post(path, json=BODIES[path] | field)
    assert reply.status_code == 400, reply.text
    assert part in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT, {"functions": None, "prediction": None, "store": False, "user": "me"}),
        (CHAT, {"metadata": {"a": "b"}, "safety_identifier": "me", "prompt_cache_key": "k"}),
        (CHAT, {"parallel_tool_calls": True, "service_tier": "auto", "modalities": ["text"]}),
        (CHAT, {"tools": [TOOL], "tool_choice": "none"}),
        (CHAT, {"return_hidden_states": False, "session_params": None, "top_logprobs": None}),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 3, "tool_choice": "auto"}),
        (COMPLETIONS, {"user": "me", "best_of": 1, "suffix": None, "stream_options": None}),
        (GENERATE, {"return_hidden_states": False, "log_metrics": True, "session_params": None}),
        # sglang's router sends all of them with every request.
        (
            GENERATE,
            dict.fromkeys(("background", "no_logs", "return_bytes", "return_entropy"), False),
        ),
        (GENERATE, {"text": [SUM, SUM], "extra_key": ["a", "a"]}),
        (GENERATE, {"lora_path": None, "return_routed_experts": False, "logprob_start_len": -1}),
    ],
)
def test_what_asks_for_nothing(plain: Running, path: str, field: dict[str, Any]) -> None:
    """A value that means what happens anyway, and names for the client's own books, are taken."""
    with plain.http() as client:
        reply = client.post(path, json=BODIES[path] | field)
    assert reply.status_code == 200, reply.text
    assert "19" in reply.text


def test_by_the_openai_package(plain: Running) -> None:
    client = plain.openai()
    asked: dict[str, dict[str, Any]] = {
        "functions": {"functions": [{"name": "f", "parameters": {}}]},
        "prediction": {"prediction": {"type": "content", "content": "19"}},
        "top_logprobs": {"top_logprobs": 2},
        "--tool-call-parser": {"tools": [TOOL]},
    }
    for part, options in asked.items():
        with pytest.raises(openai.BadRequestError, match=part):
            client.chat.completions.create(model="toy", messages=TURNS, **options)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/admin/pause", {"mode": "in_place", "seconds": 3}),
        ("/admin/continue", {"mode": "in_place"}),
        ("/admin/flush_cache", {"engine": 0}),
        ("/admin/perturb_weights", {"seed": 1, "sigma": 0.1}),
        ("/admin/reload_weights", {"model_path": "x", "version": 1}),
        ("/pause_generation", {"mod": "abort"}),
        ("/continue_generation", {"engine": 0}),
        ("/abort_request", {"rids": ["a"], "abort_all": False, "rid": "a"}),
        ("/update_weights_from_disk", {"model_path": "x", "load_format": "dummy"}),
        ("/update_weights_from_disk", {"model_path": "x", "tag": "x"}),
        ("/get_weights_by_name", {"name": "model.norm.weight", "truncate": 3}),
    ],
)
def test_administration(administered: Running, path: str, body: dict[str, Any]) -> None:
    """The same for administrators, and nothing is done."""
    with administered.http() as client:
        reply = client.post(path, json=body)
        assert reply.status_code == 400, reply.text
        assert any(name in reply.json()["error"] for name in body)
        assert client.get("/ready").status_code == 200


def test_what_slime_and_areal_send(administered: Running, sums: EnginePool) -> None:
    """sglang's body for new weights: `weight_version` counts, and empty bodies are none."""
    with administered.http() as client:
        assert client.post("/pause_generation", json={}).status_code == 200
        assert client.post("/continue_generation", json={}).status_code == 200
        path = sums.config.model
        body = {"model_path": path, "weight_version": "step-7"}
        assert client.post("/update_weights_from_disk", json=body).json()["success"] is True
        body = {"text": SUM, "sampling_params": {"temperature": 0}}
        made = client.post(GENERATE, json=body).json()
        assert made["meta_info"]["weight_version"] == "step-7"
        body = {"model_path": path, "abort_all_requests": True, "flush_cache": True}
        assert client.post("/update_weights_from_disk", json=body).json()["success"] is True


def test_the_document_says_so(plain: Running) -> None:
    with plain.http() as client:
        document = client.get("/openapi.json").json()
    for path in BODIES:
        content = document["paths"][path]["post"]["requestBody"]["content"]
        name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert document["components"]["schemas"][name]["additionalProperties"] is False
