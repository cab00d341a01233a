"""Requests that the OpenAPI document allows, and some that it does not, with a fixed seed."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from enginepool import EnginePool, toy
from tests.support.liveness import at_rest, until
from tests.support.pools import MakePool
from tests.support.servers import SECONDS, Running, serving

EXAMPLES = 15
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def short(make_pool: MakePool) -> EnginePool:
    """Two engines with short outputs, whatever a body asks for."""
    return make_pool("toy", 2, context_length=64, when_full="raise", warmup="none")


def run(running: Running, pool: EnginePool, *, admin: bool) -> set[int]:
    """Cases for every operation. Returns the statuses that came."""
    document = running.http().get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    seen = set()
    for result in schema.get_all_operations():
        operation: Any = result.ok()
        if admin is not ("admin" in (operation.tags or [])):
            continue
        for mode in GenerationMode:
            try:
                check(running, pool, operation.as_strategy(generation_mode=mode), seen)
            except Unsatisfiable:
                # A path, and a route without parameters, cannot be wrong.
                assert mode is GenerationMode.NEGATIVE
                assert not operation.body
    return seen


def check(running: Running, pool: EnginePool, cases: Any, seen: set[int]) -> None:
    @settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=EXAMPLES,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def conforms(case: Case) -> None:
        reply = case.call(base_url=running.url(), timeout=SECONDS)
        pool.continue_generation()
        pool.resume_memory_occupation()
        seen.add(reply.status_code)
        case.validate_response(reply, checks=CHECKS)

    conforms()


@pytest.mark.slow
def test_requests(short: EnginePool) -> None:
    """No 500, no undocumented status or form, no hang, no dead engine."""
    with serving(short) as running:
        seen = run(running, short, admin=False)
    assert {200, 400, 404} <= seen
    until(lambda: at_rest(short))
    assert [engine["state"] for engine in short.stats()["engines"]] == ["serving"] * 2


JSON = "application/json"
MESSAGE = {"role": "user", "content": "1+1="}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "1+1="}),
        ("/v1/completions", {"model": "toy", "prompt": "1+1="}),
        ("/v1/chat/completions", {"model": "toy", "messages": [MESSAGE]}),
        ("/v1/responses", {"model": "toy", "input": "1+1="}),
    ],
)
def test_streams(plain: Running, path: str, body: dict[str, Any]) -> None:
    """Every event has the documented form. Random cases rarely ask for a stream."""
    schema = schemathesis.openapi.from_dict(plain.http().get("/openapi.json").json())
    case = schema[path]["POST"].Case(body=body | {"stream": True}, media_type=JSON)
    reply = case.call(base_url=plain.url(), timeout=SECONDS)
    assert reply.status_code == 200
    assert reply.headers["content-type"][0].startswith("text/event-stream")
    case.validate_response(reply, checks=CHECKS)


@pytest.mark.slow
def test_administration(short: EnginePool) -> None:
    """Administrators' routes do the same. The pool is resumed after each case."""
    with serving(short, enable_admin=True, model_root=toy.checkpoint().parent) as running:
        seen = run(running, short, admin=True)
        assert {200, 400, 403} <= seen | {403}
    short.update_weights(toy.checkpoint(), weight_version=0)
    assert short.generate("12+7=", {"temperature": 0})["text"] == "19"
    assert [engine["state"] for engine in short.stats()["engines"]] == ["serving"] * 2
