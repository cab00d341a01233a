"""A field that would have no effect is an error on every route. The error says what helps."""

from typing import Any

import openai
import pytest

from enginepool import EnginePool
from tests.support.servers import Running

SUM = "12+7="
TURNS: Any = [{"role": "user", "content": SUM}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES, TOKENS, TOKENIZE = "/v1/responses", "/inference/v1/generate", "/tokenize"
SCORE = "/v1/score"
IDS = list(SUM.encode())
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TAG = {"type": "structural_tag", "triggers": ["<a"], "structures": []}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "toy", "messages": TURNS, "temperature": 0},
    COMPLETIONS: {"model": "toy", "prompt": SUM, "temperature": 0},
    GENERATE: {"text": SUM, "sampling_params": {"temperature": 0}},
    RESPONSES: {"model": "toy", "input": SUM, "temperature": 0},
    TOKENS: {"token_ids": IDS, "sampling_params": {"temperature": 0}},
    TOKENIZE: {},
    SCORE: {"query": SUM, "items": [""], "label_token_ids": [49]},
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
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs=21: "),
    (COMPLETIONS, {"logprobs": 21}, "logprobs=21: "),
    (COMPLETIONS, {"logprobs": -1}, "logprobs=-1: "),
    (CHAT, {"return_hidden_states": True}, "return_hidden_states"),
    (CHAT, {"session_params": {"id": "1"}}, "session_params"),
    (CHAT, {"parallel_tool_calls": False}, "parallel_tool_calls"),
    (CHAT, {"temprature": 0}, "did you mean temperature"),
    (CHAT, {"tool_choice": "required"}, "tools"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"tools": [TOOL]}, "--tool-call-parser"),
    (CHAT, {"chat_template_kwargs": {"self": 1}}, "'self' is not a variable of the template"),
    (CHAT, {"chat_template_kwargs": {"conversations": 1}}, "'conversations' is not a variable"),
    (CHAT, {"tools": [function(parameters=[1])]}, "tools.0.function.parameters"),
    (CHAT, {"tools": [function(parameters={"$defs": [1]})]}, "$defs: expected an object"),
    (CHAT, {"tools": [function(name=None)]}, "tools.0.function.name"),
    (COMPLETIONS, {"prediction": {"type": "content"}}, "prediction"),
    (COMPLETIONS, {"return_hidden_states": True}, "return_hidden_states"),
    (COMPLETIONS, {"session_params": {"id": "1"}}, "session_params"),
    (COMPLETIONS, {"messages": TURNS}, "messages"),
    (COMPLETIONS, {"response_format": {"type": "json_object"}}, "response_format"),
    (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt_logprobs": 1, "echo": True, "logprobs": 1}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt_logprobs": 1, "echo": True, "logprobs": 0}, "prompt_logprobs"),
    (COMPLETIONS, {"priority": 1}, "priority"),
    (COMPLETIONS, {"cache_salt": "a", "extra_key": "b"}, "extra_key"),
    (GENERATE, {"logprob_start_len": 0}, "return_logprob"),
    (
        GENERATE,
        {"logprob_start_len": 0, "return_logprob": True, "return_output_logprob_only": True},
        "without return_output_logprob_only",
    ),
    (
        GENERATE,
        {"text": [SUM, SUM], "return_logprob": True, "logprob_start_len": [-1, 0]},
        "for every prompt",
    ),
    (GENERATE, {"return_logprob": True, "token_ids_logprob": [5] * 65}, "token_ids_logprob"),
    (CHAT, {"token_ids_logprob": [5]}, "token_ids_logprob"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
    (GENERATE, {"temperature": 0}, "temperature=0; it belongs in sampling_params"),
    (GENERATE, {"max_tokens": 1}, "max_tokens=1; it belongs in sampling_params"),
    (GENERATE, {"sampling_params": {"max_tokens": 1}}, "did you mean max_new_tokens"),
    (TOKENS, {"n": 2}, "n=2; it belongs in sampling_params"),
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
    (CHAT, {"return_tokens_as_token_ids": True}, "without logprobs"),
    (COMPLETIONS, {"return_tokens_as_token_ids": True}, "without logprobs"),
    (CHAT, {"separate_reasoning": True}, "--reasoning-parser"),
    (CHAT, {"stream_reasoning": False}, "--reasoning-parser"),
    (CHAT, {"continue_final_message": True}, "the last message is not the assistant's"),
    (
        CHAT,
        {
            "continue_final_message": True,
            "messages": [*TURNS, {"role": "assistant", "content": "1", "tool_calls": [CALL]}],
        },
        "goes on after content only",
    ),
    (CHAT, {"response_format": FORMAT | {"type": "text"}}, "of type text with json_schema"),
    (RESPONSES, {"prompt_cache": "x"}, "prompt_cache"),
    (RESPONSES, {"n": 2}, "n=2; it would have no effect"),
    (TOKENS, {"features": [1]}, "features"),
    (TOKENS, {"sampling_params": {"max_new_tokens": 1}}, "did you mean max_tokens"),
    (TOKENIZE, {"prompt": SUM, "tools": [TOOL]}, "tools"),
    (TOKENIZE, {"prompt": SUM, "continue_final_message": True}, "is for messages"),
    (TOKENIZE, {"prompt": SUM, "chat_template_kwargs": {"a": 1}}, "is for messages"),
    (TOKENIZE, {"messages": TURNS, "add_special_tokens": True}, "the chat template adds"),
    (SCORE, {"prompt": SUM}, "prompt"),
]


def turn(**fields: Any) -> dict[str, Any]:
    return {"messages": [TURNS[0] | fields]}


def answered(**fields: Any) -> dict[str, Any]:
    return {"messages": [*TURNS, {"role": "assistant", "content": "19", **fields}, *TURNS]}


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": SUM, **fields}]}


# Names inside a body. `where` is their name in the error.
NESTED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, turn(zz=1), "messages.0.zz"),
    (
        CHAT,
        turn(content=[{"type": "text", "text": SUM, "zz": {"a": 1}}]),
        "messages.0.content.0.zz",
    ),
    (CHAT, answered(refusal="no"), "messages.1.refusal"),
    (CHAT, answered(audio={"id": "x"}), "messages.1.audio"),
    (CHAT, answered(function_call={"name": "f", "arguments": ""}), "messages.1.function_call"),
    (CHAT, answered(tool_calls=[CALL | {"zz": 1}]), "messages.1.tool_calls.0.zz"),
    (
        CHAT,
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "include_obfuscation",
    ),
    (CHAT, {"response_format": {"type": "json_object", "zz": 1}}, "response_format.zz"),
    (
        CHAT,
        {"response_format": FORMAT | {"json_schema": {**FORMAT["json_schema"], "zz": 1}}},  # type: ignore[dict-item]
        "response_format.json_schema.zz",
    ),
    (CHAT, {"response_format": TAG | {"at_least_one": True}}, "response_format.at_least_one"),
    (CHAT, {"tools": [TOOL | {"zz": 1}], "tool_choice": "none"}, "tools.0.zz"),
    (
        CHAT,
        {
            "tool_choice": {"type": "function", "function": {"name": "f"}, "mode": "x"},
            "tools": [TOOL],
        },
        "tool_choice.mode",
    ),
    (TOKENIZE, turn(zz=1), "messages.0.zz"),
    (CHAT, {"structured_outputs": {"regex": "1", "zz": 1}}, "structured_outputs.zz"),
    (RESPONSES, {"text": {"format": {"type": "text", "zz": 1}}}, "text.format.zz"),
    (RESPONSES, item(zz=1), "input.0.zz"),
    (
        RESPONSES,
        {"tool_choice": {"type": "function", "name": "f", "zz": 1}},
        "tool_choice.zz",
    ),
    (
        RESPONSES,
        item(content=[{"type": "input_text", "text": SUM, "zz": 1}]),
        "input.0.content.0.zz",
    ),
]


@pytest.mark.parametrize(("path", "field", "part"), IGNORED)
def test_a_field_without_effect_is_refused(
    plain: Running, path: str, field: dict[str, Any], part: str
) -> None:
    with plain.http() as client:
        reply = client.post(path, json=BODIES[path] | field)
    assert reply.status_code == 400, reply.text
    assert part in reply.json()["error"]["message"]


@pytest.mark.parametrize(("path", "field", "where"), NESTED)
def test_an_inner_field_without_effect_is_refused(
    plain: Running, path: str, field: dict[str, Any], where: str
) -> None:
    with plain.http() as client:
        reply = client.post(path, json=BODIES[path] | field)
    assert reply.status_code == 400, reply.text
    assert f"{where}=" in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == next(name for name in field if name != "stream")


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        (TOKENS, {"token_ids": [True]}, "token_ids: true and false are no token ids"),
        (TOKENS, {"token_ids": ["49"]}, "token_ids.0=<str of 2 characters>"),
        ("/detokenize", {"tokens": [True]}, "tokens: true and false are no token ids"),
        (GENERATE, {"text": None, "input_ids": [49, True]}, "input_ids: true and false"),
        (COMPLETIONS, {"prompt": [IDS, [False]]}, "prompt: true and false"),
        (SCORE, {"query": [True], "items": [IDS]}, "query: true and false"),
        (SCORE, {"label_token_ids": [True]}, "label_token_ids.0=True"),
        (RESPONSES, {"text": {"format": {"type": "text", "schema": {}}}}, "with a schema"),
    ],
)
def test_values_that_mean_nothing(
    plain: Running, path: str, body: dict[str, Any], part: str
) -> None:
    with plain.http() as client:
        reply = client.post(path, json=BODIES.get(path, {}) | body)
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
        (CHAT, turn(name="somebody")),
        (CHAT, {"echo": False, "add_generation_prompt": True, "add_special_tokens": False}),
        (CHAT, {"functions": [], "function_call": "none", "reasoning_effort": None}),
        (CHAT, {"use_beam_search": False, "length_penalty": 1.0, "documents": [], "bad_words": []}),
        (CHAT, {"include_stop_str_in_output": False, "custom_params": {}, "top_logprobs": 0}),
        (CHAT, {"verbosity": "medium", "prompt_cache_retention": "in_memory", "reasoning": {}}),
        (CHAT, {"vllm_xargs": {}, "kv_transfer_params": None, "include_reasoning": True}),
        (COMPLETIONS, {"use_beam_search": False, "length_penalty": 1, "add_special_tokens": True}),
        (COMPLETIONS, {"spaces_between_special_tokens": True, "detokenize": True, "stop": []}),
        (GENERATE, {"require_reasoning": False, "custom_logit_processor": None, "priority": 0}),
        (
            GENERATE,
            {"sampling_params": {"temperature": 0, "stop_regex": [], "seed": None, "best_of": 1}},
        ),
        (RESPONSES, {"truncation": "auto", "reasoning": {"effort": None}, "max_tool_calls": None}),
        (RESPONSES, {"include": ["file_search_call.results"], "text": {"verbosity": "medium"}}),
        (
            TOKENS,
            {
                "sampling_params": {
                    "temperature": 0,
                    "bad_words": [],
                    "logit_bias": {},
                    "flat_logprobs": False,
                }
            },
        ),
        (CHAT, {"separate_reasoning": False, "stream_reasoning": True}),
        (TOKENIZE, {"prompt": SUM, "add_special_tokens": True, "tools": []}),
        (TOKENIZE, {"messages": TURNS, "add_special_tokens": False}),
    ],
)
def test_a_field_with_its_default_value_is_accepted(
    plain: Running, path: str, field: dict[str, Any]
) -> None:
    """So are names that clients use for themselves."""
    with plain.http() as client:
        reply = client.post(path, json=BODIES[path] | field)
    assert reply.status_code == 200, reply.text
    assert path in (TOKENIZE, TOKENS) or "19" in reply.text


@pytest.mark.parametrize(
    ("path", "field", "part"),
    [
        (CHAT, {"use_beam_search": True}, "use_beam_search=True"),
        (CHAT, {"length_penalty": 0.5}, "length_penalty=0.5"),
        (CHAT, {"add_generation_prompt": False}, "add_generation_prompt=False"),
        (CHAT, {"add_special_tokens": True}, "add_special_tokens=True"),
        (CHAT, {"documents": [{"text": "1"}]}, "documents"),
        (CHAT, {"strem": False}, "did you mean stream"),
        (CHAT, {"custom_params": {"weight": 1}}, "custom_params.weight=1"),
        (CHAT, {"custom_params": {"temperature": 1}}, "custom_params.temperature=1"),
        (COMPLETIONS, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens=5"),
        (GENERATE, {"sampling_params": {"stop_regex": "1"}}, "stop_regex"),
        (TOKENS, {"sampling_params": {"logit_bias": {"1": 2}}}, "logit_bias"),
        (RESPONSES, {"include": ["reasoning.encrypted_content"]}, "reasoning.encrypted_content"),
    ],
)
def test_other_values_of_ignored_fields_are_refused(
    plain: Running, path: str, field: dict[str, Any], part: str
) -> None:
    """The same fields with values that would change the answer are refused by name."""
    with plain.http() as client:
        reply = client.post(path, json=BODIES[path] | field)
    assert reply.status_code == 400, reply.text
    assert part in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        # Messages as the openai package's models write the ones that they received.
        (CHAT, answered(refusal=None, annotations=[], audio=None, function_call=None)),
        (CHAT, answered(provider_specific_fields={"refusal": "no"})),  # LiteLLM's
        (
            RESPONSES,
            item(type="message", status="completed", id="msg_1",
                 content=[{"type": "input_text", "text": SUM, "annotations": [], "logprobs": []}]),
        ),
        (CHAT, {"stream": True, "stream_options": {"include_obfuscation": False}}),
        (CHAT, {"messages": [{"role": "developer", "content": "Add."}, *TURNS]}),
        (TOKENIZE, {"messages": [{"role": "developer", "content": "Add."}, *TURNS]}),
        (CHAT, answered(content=[{"type": "refusal", "refusal": "No."}])),
        (CHAT, answered(tool_calls=[CALL | {"function": {"name": "f", "arguments": {"a": 1}}}])),
        (
            CHAT,
            {"tools": [{"type": "function", "function": TOOL["function"] | {"strict": None}}],  # type: ignore[operator]
             "tool_choice": "none"},
        ),
        (
            RESPONSES,
            item(role="assistant", content=[{"type": "refusal", "refusal": "No."}]),
        ),
        (COMPLETIONS, {"model": None}),
        (TOKENIZE, {"messages": [*TURNS, {"role": "assistant", "tool_calls": [CALL]}]}),
        # Of vLLM's dataclass, with its defaults.
        (
            CHAT,
            {"structured_outputs": {"regex": "19", "json": None, "disable_any_whitespace": False}},
        ),
        (
            TOKENS,
            {"sampling_params": {"structured_outputs": {"regex": "19", "disable_fallback": False}}},
        ),
        (RESPONSES, {"text": {"format": {"type": "text", "zz": None}, "zz": []}}),
    ],
)  # fmt: skip
def test_fields_that_clients_add_are_accepted(
    plain: Running, path: str, field: dict[str, Any]
) -> None:
    with plain.http() as client:
        reply = client.post(path, json=BODIES[path] | field)
    assert reply.status_code == 200, reply.text


def test_fields_that_request_log_probabilities(plain: Running) -> None:
    """On /generate, a field that says which log-probabilities are wanted also requests them."""
    with plain.http() as client:
        for field in ({"top_logprobs_num": 2}, {"token_ids_logprob": [49]}):
            meta = client.post(GENERATE, json=BODIES[GENERATE] | field).json()["meta_info"]
            assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]


def test_a_query(plain: Running) -> None:
    """Routes that change something check the names in a query. Probes accept any."""
    with plain.http() as client:
        reply = client.post(GENERATE, params={"stream": True}, json=BODIES[GENERATE])
        assert reply.status_code == 400
        message = reply.json()["error"]["message"]
        assert "stream=<str of 4 characters>; no fields are allowed here" in message
        assert client.get("/health", params={"now": 1}).status_code == 200


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
    """Administrators' routes do the same, and change nothing."""
    with administered.http() as client:
        reply = client.post(path, json=body)
        assert reply.status_code == 400, reply.text
        assert any(name in reply.json()["error"] for name in body)
        assert client.get("/ready").status_code == 200


@pytest.mark.parametrize(
    "path", ["/resume", "/flush_cache", "/admin/pause", "/pause", "/wake_up", "/admin/flush_cache"]
)
def test_queries_of_administrators(administered: Running, path: str) -> None:
    with administered.http() as client:
        reply = client.post(path, params={"zz": 1})
        assert reply.status_code == 400, reply.text
        assert "zz" in reply.json()["error"]
        if path == "/flush_cache":
            assert client.get(path, params={"engine": 0}).status_code == 400
        assert client.get("/ready").status_code == 200


def test_what_slime_and_areal_send(administered: Running, sums: EnginePool) -> None:
    """sglang's body for new weights: `weight_version` has an effect, and empty values have none."""
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
