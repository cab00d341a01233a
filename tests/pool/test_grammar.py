"""Structured output: outputs follow their grammars, and other requests do not change."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from enginepool import EnginePool, InvalidGrammar, InvalidRequest
from enginepool.toy.files import END_ID
from tests.support.forced import output_logits
from tests.support.grammars import HOSTILE, multiples
from tests.support.liveness import SECONDS, callers
from tests.support.marks import slow
from tests.support.pools import compilations, same
from tests.support.schemas import COMPACT, random_schema

WORD = {"regex": "(ab|cd|e[0-9])+", "max_new_tokens": 40}
DIGITS = [ord(digit) for digit in "0123456789"]
STOP = {"type": "stop", "matched": END_ID}


def seeded(seed: int, **params: Any) -> dict[str, Any]:
    return {"temperature": 1.0, "sampling_seed": seed, **params}


def reason(result: dict[str, Any]) -> dict[str, Any]:
    return result["meta_info"]["finish_reason"]


@pytest.mark.parametrize("schemas", [50, *slow(1000)])
def test_random_schemas(pool: EnginePool, schemas: int) -> None:
    """Every answer of a model with random weights parses and validates. Requests without a
    grammar in the same batches get the tokens that they get alone, and nothing is compiled."""
    rng = random.Random(schemas)
    free = seeded(5, max_new_tokens=30, ignore_eos=True)
    documents = 0
    while documents < schemas:
        wanted = [random_schema(rng) for _ in range(25)]
        mixed = [
            params
            for schema in wanted
            for params in (
                seeded(rng.getrandbits(30), json_schema=schema, max_new_tokens=400),
                free,
            )
        ]
        prompts = [[65 + index, 40] for index in range(len(mixed))]
        alone = pool.generate_all(input_ids=prompts, sampling_params=free, return_logprob=True)
        with compilations() as compiled:
            results = pool.generate_all(
                input_ids=prompts, sampling_params=mixed, return_logprob=True, timeout=SECONDS
            )
        assert compiled == []
        same(results[1::2], alone[1::2])
        for schema, result in zip(wanted, results[::2], strict=True):
            assert reason(result) == STOP, (schema, result)
            jsonschema_rs.validate(schema, json.loads(result["text"]))
        documents += len(wanted)


def test_the_law_is_the_models_among_what_is_allowed(
    pool: EnginePool, model_dir: Callable[[str], Path]
) -> None:
    """Greedy ids and all log-probabilities are those of a plain forward pass, restricted to what
    the grammar allows. If only the end is allowed, it has all probability."""
    prompts = [[65 + index, 3 * index] for index in range(8)]
    params = [{"temperature": t, "regex": "[0-9]{5}"} for t in (0, 1.0, 0.5, 1.7) for _ in range(2)]
    results = pool.generate_all(
        input_ids=prompts, sampling_params=params, return_logprob=True, top_logprobs_num=20
    )
    outputs = [result["output_ids"] for result in results]
    logits = output_logits(model_dir("qwen3"), prompts, outputs)
    for result, param, rows in zip(results, params, logits, strict=True):
        assert re.fullmatch("[0-9]{5}", result["text"])
        assert len(result["output_ids"]) == 6
        meta = result["meta_info"]
        assert meta["output_token_logprobs"][-1][:2] == (pytest.approx(0, abs=1e-5), END_ID)
        for place, row in enumerate(rows[:5]):
            law = row[DIGITS].astype(np.float64) / (param["temperature"] or 1.0)
            law -= np.log(np.exp(law - law.max()).sum()) + law.max()
            value, token_id, _ = meta["output_token_logprobs"][place]
            assert value == pytest.approx(law[DIGITS.index(token_id)], abs=1e-4)
            if param["temperature"] == 0:
                assert law[DIGITS.index(token_id)] > law.max() - 1e-3
            top = meta["output_top_logprobs"][place]
            assert {entry[1] for entry in top} == set(DIGITS)  # and no forbidden id
        assert len(meta["output_top_logprobs"][-1]) == 1


def test_each_request_has_a_state_of_its_own(pool: EnginePool) -> None:
    """Several samples of a prompt and many calls at once use one grammar, streamed or not."""
    params = seeded(1, **WORD, n=6)
    expected = [r["output_ids"] for r in pool.generate_all([" a", "b"], params)]
    assert len(set(map(tuple, expected))) > len(expected) / 2

    def streamed() -> list[list[int]]:
        ended: dict[int, list[int]] = {}
        for chunk in pool.stream([" a", "b"], params):
            assert chunk["text"][:1] in "ace"  # from the beginning of the grammar
            ended[chunk["index"]] = chunk["output_ids"]
        return [ended[index] for index in range(12)]

    with callers(6) as executor:
        calls = [
            executor.submit(streamed)
            if number % 2
            else executor.submit(
                lambda: [r["output_ids"] for r in pool.generate_all([" a", "b"], params)]
            )
            for number in range(6)
        ]
        assert [call.result(SECONDS) for call in calls] == [expected] * 6


def test_the_grammar_cache_is_bounded(pool: EnginePool) -> None:
    """The same grammar is compiled once. If there are very many, the oldest is dropped."""
    compiler = pool.runtime.input_processor.grammars
    pool.generate("a", {"regex": "[0-9]kept", "max_new_tokens": 8})
    kept = list(compiler.kept)[-1]
    compiled = compiler.kept[kept]
    pool.generate_all(["a", "b"], {"regex": "[0-9]kept", "max_new_tokens": 8})
    assert compiler.kept[kept] is compiled
    assert compiled.seconds > 0
    for number in range(150):
        pool.generate("a", {"regex": f"{number}", "max_new_tokens": 8})
    assert len(compiler.kept) == 128
    assert kept not in compiler.kept


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"regex": "("}, ["regex='('", "does not compile", "unclosed group"]),
    ({"regex": "(?=a)b"}, ["look-around"]),
    ({"regex": 5}, ["regex=5", "expected a string"]),
    ({"regex": "a" * 300_000}, ["300000 characters", "at most 262144"]),
    ({"json_schema": "{"}, ["json_schema='{'", "not JSON"]),
    ({"json_schema": {"type": "nope"}}, ["nope"]),
    ({"json_schema": [1]}, ["json_schema=[1]", "a JSON object"]),
    ({"json_schema": {"a": {1, 2}}}, ["not JSON"]),
    ({"json_schema": '{"a":' * 5000 + "1" + "}" * 5000}, ["not JSON"]),
    ({"json_schema": {"type": "string", "minLength": 2, "maxLength": 1}}, ["nsatisfiable"]),
    ({"json_schema": {"not": {"type": "string"}}}, ['["not"]']),
    ({"json_schema": {"type": "array", "minItems": 10**9}}, ["minItems=1000000000", "10000"]),
    ({"json_schema": {"multipleOf": 999983}}, ["multipleOf=999983", "10000"]),
    (
        {
            "json_schema": {
                "allOf": [{"anyOf": [{"pattern": f"{i}{j}"} for i in range(9)]} for j in range(9)]
            }
        },
        ["allOf", "1000"],
    ),
    ({"json_schema": {"$ref": "https://example.com/x.json"}}, ["example.com"]),
    (
        {"ebnf": 'start: "a" %json {"type": "array", "minItems": 1000000000}'},
        ["minItems=1000000000"],
    ),
    ({"ebnf": "root ::= foo"}, ["ebnf='root ::= foo'", "foo"]),
    ({"ebnf": "root ::= " + "(" * 5000}, ["does not compile"]),
    ({"structural_tag": {"type": "structural_tag"}}, ["structures", "triggers"]),
    HOSTILE["schemas"],
    *slow(
        ({"json_schema": multiples(150)}, ["more than", "to compile"]),
    ),
    ({"structural_tag": "[]"}, ["a JSON object"]),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, ["regex and ebnf", "give one"]),
    ({"regex": "a", "ignore_eos": True}, ["ignore_eos=True with regex", "end token"]),
    ({"regex": "a", "min_new_tokens": 2}, ["min_new_tokens=2 with regex"]),
]


@pytest.mark.parametrize(("params", "words"), BAD)
def test_bad_grammar(pool: EnginePool, params: dict[str, Any], words: list[str]) -> None:
    """The error has the grammar's text and the reason, before anything starts, and engines keep
    serving."""
    before = len(pool.events())
    with pytest.raises(InvalidRequest) as caught:
        pool.generate_all(["a", "b"], {"max_new_tokens": 5, **params})
    for word in words:
        assert word in str(caught.value)
    if "give one" not in words and "with regex" not in words[0]:
        assert isinstance(caught.value, InvalidGrammar)
    with pytest.raises(InvalidRequest) as second:
        pool.generate_all(["a", "b"], [{"max_new_tokens": 5}, {"max_new_tokens": 5, **params}])
    assert second.value.prompt_index == 1
    assert type(second.value) is type(caught.value)
    (result,) = pool.generate_all(["a"], {"regex": "[xy]{3}"})
    assert re.fullmatch("[xy]{3}", result["text"])
    assert len(pool.events()) == before


def test_states_are_replayed_where_requests_resume(
    four: EnginePool, model_dir: Callable[[str], Path]
) -> None:
    """Pauses and swaps that retract requests in the middle of an output change no token: seeded
    outputs are those of an undisturbed pool."""
    prompts = [[70 + index, 9] for index in range(8)]
    schema = {
        "type": "array",
        "items": {"type": "integer", "maximum": 99},
        "minItems": 12,
        **COMPACT,
    }
    params = [seeded(3, regex="([a-f]{3}-){15}[0-9]", max_new_tokens=80)] * 4
    params += [seeded(3, json_schema=schema, max_new_tokens=80)] * 4
    options: dict[str, Any] = {"input_ids": prompts, "sampling_params": params}
    expected = four.generate_all(**options, return_logprob=True)
    for disturb in (
        lambda: (four.pause_generation("retract"), four.continue_generation()),
        lambda: (four.pause_generation("in_place"), four.continue_generation()),
        lambda: four.update_weights(model_dir("qwen3"), mode="retract"),
        lambda: four.update_weights(model_dir("qwen3"), mode="in_place"),
    ):
        ended: list[Any] = [None] * 8
        for number, chunk in enumerate(four.stream(**options, return_logprob=True)):
            if number in (20, 60):
                disturb()
            ended[chunk["index"]] = chunk
        same(ended, expected)


@pytest.mark.slow
def test_more_work_than_kv_cache(pool: EnginePool, retracted: list[int]) -> None:
    """Upstream retracts requests in the middle of their outputs, which stay the same."""
    prompts = [[70 + index, 9] for index in range(24)]
    params = seeded(3, regex="([a-f]{3}-){70}", max_new_tokens=300)
    expected = pool.generate_all(input_ids=prompts[:1], sampling_params=params)
    pool.flush_cache()
    results = pool.generate_all(input_ids=prompts, sampling_params=params, timeout=SECONDS)
    assert sum(retracted) > 0
    assert all(re.fullmatch(params["regex"], result["text"]) for result in results)
    assert results[0]["output_ids"] == expected[0]["output_ids"]
