"""Log-probabilities of ids that a call names are the reference's, for outputs and prompts."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from enginepool import EnginePool
from tests.pool.test_bad_input import refused
from tests.support import faults
from tests.support.forced import LOGPROB_TOLERANCE, logprobs, output_logits
from tests.support.liveness import SECONDS, at_rest, callers, running, until
from tests.support.marks import steady_decode
from tests.support.pools import MakePool, compilations, same
from tests.support.scores import assert_named, assert_prompt_logprobs, ids, reference
from tests.support.steady import steps

ModelDir = Callable[[str], Path]
GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 20}
PROMPTS = [ids(length, length) for length in (3, 90, 40, 7, 70, 11)]
# As many as are allowed, not in order, one of them twice.
NAMED: list[list[int]] = [[5], [200, 7, 7, 0, 271], random.Random(1).choices(range(272), k=64)]


@pytest.fixture
def model(model_dir: ModelDir) -> Path:
    return model_dir("qwen3")


def assert_outputs(
    model: Path,
    prompts: Sequence[list[int]],
    named: Sequence[Sequence[int]],
    results: Sequence[dict[str, Any]],
    temperatures: Sequence[float] | None = None,
) -> None:
    """Checks every position of every output."""
    outputs = [result["output_ids"] for result in results]
    assert all(outputs)
    logits = output_logits(model, prompts, outputs)
    for index, (rows, asked, result) in enumerate(zip(logits, named, results, strict=True)):
        temperature = (temperatures[index] if temperatures else 0) or 1.0
        entries = result["meta_info"]["output_token_ids_logprobs"]
        assert_named(logprobs(rows, temperature), asked, entries)


def of_prompt(model: Path, prompt: list[int], start: int, named: Sequence[int], meta: Any) -> None:
    """Checks every position of a prompt from `start` on."""
    assert_prompt_logprobs(model, prompt, meta)
    entries = meta["input_token_ids_logprobs"]
    assert len(entries) == len(prompt) - start
    if start == 0:
        assert entries[0] is None
        entries, start = entries[1:], 1
    if entries:
        assert_named(reference(model, [prompt[:start]], [prompt[start:]])[0], named, entries)


def test_beside_others(pool: EnginePool, model: Path) -> None:
    """In one batch with requests that want none, the most probable ids, or other ids. Their
    outputs and values stay the same. Nothing is compiled."""
    temperatures = [0.0, 0.7, 1.0, 0.0, 1.5, 1.0]
    each = [
        {"max_new_tokens": 15 + n, "temperature": t, "sampling_seed": n, "ignore_eos": True}
        for n, t in enumerate(temperatures)
    ]
    options: Any = {"input_ids": PROMPTS, "sampling_params": each, "return_logprob": True}
    named = [*NAMED, *NAMED]
    expected = pool.generate_all(**options)
    with compilations() as seen, callers(3) as executor:
        others = [
            executor.submit(pool.generate_all, **options),
            executor.submit(pool.generate_all, **options, top_logprobs_num=3),
        ]
        results = pool.generate_all(**options, token_ids_logprob=named)
        both = pool.generate_all(**options, token_ids_logprob=[9, 8], top_logprobs_num=3)
        plain, top = (other.result(SECONDS) for other in others)
    assert seen == []
    for made in (results, both, plain, top):
        same(made, expected)
    assert_outputs(model, PROMPTS, named, results, temperatures)
    assert_outputs(model, PROMPTS, [[9, 8]] * 6, both, temperatures)
    for result, other in zip(both, top, strict=True):
        a, b = (one["meta_info"]["output_top_logprobs"] for one in (result, other))
        assert [[e[1] for e in row] for row in a] == [[e[1] for e in row] for row in b]
    assert not any("output_token_ids_logprobs" in one["meta_info"] for one in (*plain, *top))
    assert not any("output_top_logprobs" in one["meta_info"] for one in results)


def test_of_a_prompt_that_is_cached(make_pool: MakePool, model: Path) -> None:
    """The values of cached prefixes are computed all the same."""
    pool = make_pool("qwen3", 1)
    prompt = ids(120, 5)
    first, again = (
        pool.generate(input_ids=prompt, sampling_params=GREEDY, token_ids_logprob=NAMED[2])
        for _ in range(2)
    )
    assert again["meta_info"]["cached_tokens"] > 100
    assert_outputs(model, [prompt] * 2, [NAMED[2]] * 2, [first, again])


@pytest.mark.parametrize("start", [0, 1, 80])
def test_of_prompts(pool: EnginePool, model: Path, start: int) -> None:
    """From a token on, in pieces, beside prompts that want none."""
    prompts = [ids(length, length) for length in (90, 300, 81)]
    options: Any = {
        "input_ids": prompts, "sampling_params": GREEDY | {"n": 2},
        "return_prompt_logprob": True, "logprob_start_len": start,
    }  # fmt: skip
    with compilations() as seen:
        results = pool.generate_all(**options, token_ids_logprob=[NAMED[2], None, NAMED[0]])
    assert seen == []
    for result in results:
        meta = result["meta_info"]
        index = meta["prompt_index"]
        if index == 1:
            assert_prompt_logprobs(model, prompts[1], meta)
            assert "input_token_ids_logprobs" not in meta
            assert "output_token_ids_logprobs" not in meta
        else:
            named = NAMED[2] if index == 0 else NAMED[0]
            of_prompt(model, prompts[index], start, named, meta)
            assert_outputs(model, [prompts[index]], [named], [result])
    assert at_rest(pool)


def test_of_prompts_alone(pool: EnginePool, model: Path) -> None:
    """With `max_new_tokens` of 0, also for a prompt of one token, which follows nothing."""
    prompts = [ids(30), ids(1)]
    results = pool.generate_all(
        input_ids=prompts, sampling_params={"max_new_tokens": 0}, return_prompt_logprob=True,
        token_ids_logprob=NAMED[1],
    )  # fmt: skip
    for prompt, result in zip(prompts, results, strict=True):
        of_prompt(model, prompt, 0, NAMED[1], result["meta_info"])
        assert result["meta_info"]["output_token_ids_logprobs"] == []


@pytest.mark.parametrize("top", [0, 2])
def test_score(pool: EnginePool, model: Path, top: int) -> None:
    """More prompts than fit a run, each with its own ids."""
    prompts, continuations = [ids(20, n) for n in range(24)], [ids(9, n) for n in range(24)]
    named = [NAMED[n % 3] for n in range(24)]
    with compilations() as seen:
        results = pool.score(
            input_ids=prompts, continuation_ids=continuations, token_ids_logprob=named,
            top_logprobs_num=top,
        )  # fmt: skip
    assert seen == []
    expected = reference(model, prompts, continuations)
    for rows, asked, result in zip(expected, named, results, strict=True):
        assert_named(rows, asked, result["token_ids_logprobs"])
        assert ("top_logprobs" in result) == (top > 0)
    plain = pool.score(input_ids=prompts[0], continuation_ids=continuations[0])
    assert "token_ids_logprobs" not in plain


def test_async_score(pool: EnginePool, model: Path) -> None:
    async def ask() -> Any:
        return await pool.async_score(
            input_ids=ids(5), continuation_ids=ids(3), token_ids_logprob=NAMED[1]
        )

    rows = reference(model, [ids(5)], [ids(3)])[0]
    assert_named(rows, NAMED[1], anyio.run(ask)["token_ids_logprobs"])


@pytest.mark.slow
def test_one_engine_on_two_devices(make_pool: MakePool, model_dir: ModelDir) -> None:
    """The vocabulary is sharded over both."""
    pool = make_pool("llama", 1, tp_size=2)
    prompts = [ids(90), ids(3)]
    with compilations() as seen:
        results = pool.generate_all(
            input_ids=prompts, sampling_params=GREEDY, return_prompt_logprob=True,
            token_ids_logprob=NAMED[2],
        )  # fmt: skip
    assert seen == []
    assert_outputs(model_dir("llama"), prompts, [NAMED[2]] * 2, results)
    for prompt, result in zip(prompts, results, strict=True):
        of_prompt(model_dir("llama"), prompt, 0, NAMED[2], result["meta_info"])


# With what else happens to an output


@steady_decode
def test_a_request_that_joins_others(make_pool: MakePool, model: Path) -> None:
    """Requests with named ids join others that decode. The others continue in steady decode and
    lose no token."""
    pool = make_pool("qwen3", 1)
    prompts, few = [[5, 9, n] for n in range(2)], [ids(3), ids(7)]
    params = GREEDY | {"max_new_tokens": 300}
    options: Any = {"input_ids": prompts, "sampling_params": params, "return_logprob": True}
    expected = pool.generate_all(**options)
    with callers(1) as executor:
        steady, own = steps(pool)
        others = executor.submit(pool.generate_all, **options)
        until(lambda: running(pool) == 2 and steps(pool)[0] > steady)
        results = pool.generate_all(
            input_ids=few, sampling_params=GREEDY, token_ids_logprob=NAMED[1:]
        )
        assert not others.done()
        between = steps(pool)
        same(others.result(SECONDS), expected)
    assert_outputs(model, few, NAMED[1:], results)
    assert steps(pool)[0] > between[0] >= steady + 18
    assert steps(pool)[1] == own


@pytest.fixture
def one(make_pool: MakePool, model_dir: ModelDir) -> Iterator[EnginePool]:
    """One engine, which gets its own weights back afterwards."""
    pool = make_pool("qwen3", 1)
    yield pool
    pool.update_weights(model_dir("qwen3"), weight_version=0)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_over_a_swap(
    one: EnginePool, model_dir: ModelDir, target: Callable[[str], Path], mode: Any
) -> None:
    """Every value is of the weights that made its token, and after a retract of no other
    weights."""
    prompts, params = PROMPTS[:3], GREEDY | {"max_new_tokens": 60}
    channel = one.runtime.workers[0].channel
    let_go = faults.hang_in_step(one, 0, at=10)
    with callers(2) as executor:
        answer = executor.submit(
            one.generate_all, input_ids=prompts, sampling_params=params, return_logprob=True,
            token_ids_logprob=NAMED[2],
        )  # fmt: skip
        assert let_go.begun.wait(SECONDS)
        swap = executor.submit(one.update_weights, target("qwen3"), mode=mode, weight_version=1)
        until(channel.has_jobs)
        let_go.set()
        swap.result(SECONDS)
        results = answer.result(SECONDS)
    outputs = [result["output_ids"] for result in results]
    laws = [output_logits(of("qwen3"), prompts, outputs) for of in (model_dir, target)]
    for index, result in enumerate(results):
        meta = result["meta_info"]
        named = meta["output_token_ids_logprobs"]
        assert len(named) == 60
        assert [version for *_, version in meta["weight_versions"]] == [0, 1]
        for start, end, version in meta["weight_versions"]:
            if version == 0 or mode == "retract":
                rows = logprobs(laws[version][index])[start:end]
                assert_named(rows, NAMED[2], named[start:end])
        for place, (value, token_id, _) in zip(named, meta["output_token_logprobs"], strict=True):
            found = [other for other, name, _ in place if name == token_id]
            assert found[:1] == pytest.approx([value] * len(found[:1]), abs=LOGPROB_TOLERANCE)


def test_outputs_that_are_retracted(make_pool: MakePool, model: Path, retracted: list[int]) -> None:
    """For lack of KV cache. They resume later."""
    pool = make_pool("qwen3", 1)
    prompts = [[100 + n, 9] for n in range(6)]
    params = {
        "temperature": 0,
        "max_new_tokens": 300,
    }  # `ignore_eos` would reserve all
    results = pool.generate_all(
        input_ids=prompts, sampling_params=params, token_ids_logprob=NAMED[1]
    )
    assert sum(retracted) > 0
    assert_outputs(model, prompts, [NAMED[1]] * 6, results)


def test_stream(pool: EnginePool) -> None:
    """Each chunk has the values of its ids."""
    expected = pool.generate_all(
        input_ids=PROMPTS, sampling_params=GREEDY, token_ids_logprob=NAMED[1]
    )
    for chunk in pool.stream(input_ids=PROMPTS, sampling_params=GREEDY, token_ids_logprob=NAMED[1]):
        whole = expected[chunk["index"]]["meta_info"]["output_token_ids_logprobs"]
        got = chunk["meta_info"]["output_token_ids_logprobs"]
        assert len(got) == len(chunk["output_ids"])
        values, wanted = (
            np.array([[value for value, *_ in place] for place in rows])
            for rows in (got, whole[: len(got)])
        )
        np.testing.assert_allclose(values, wanted, rtol=0, atol=LOGPROB_TOLERANCE)


def test_an_output_that_goes_on(pool: EnginePool, model: Path) -> None:
    """It resumes from a part, which must have values of the same ids."""
    options: Any = {
        "input_ids": PROMPTS[:2], "sampling_params": GREEDY, "token_ids_logprob": NAMED[1],
    }  # fmt: skip
    whole = pool.generate_all(**options)
    names = ("output_token_logprobs", "output_token_ids_logprobs")
    parts = [
        {
            "output_ids": result["output_ids"][:7],
            "meta_info": {name: result["meta_info"][name][:7] for name in names},
        }
        for result in whole
    ]
    results = pool.generate_all(**options, partial_outputs=parts)
    same(results, whole)
    assert_outputs(model, PROMPTS[:2], [NAMED[1]] * 2, results)
    other = options | {"token_ids_logprob": NAMED[0], "partial_outputs": parts}
    refused(pool, lambda: pool.generate_all(**other), "output_token_ids_logprobs", prompt=0)
    del parts[1]["meta_info"][names[1]]
    refused(
        pool, lambda: pool.generate_all(**options, partial_outputs=parts),
        "output_token_ids_logprobs", "because of token_ids_logprob", prompt=1,
    )  # fmt: skip


def test_an_id_that_cannot_come(pool: EnginePool, model: Path) -> None:
    """Forbidden by a grammar or before `min_new_tokens`: its value is minus infinity, and the
    others' law excludes it."""
    end = pool.engines[0].tokenizer_manager.tokenizer.eos_token_id
    each = [
        {"temperature": 0, "max_new_tokens": 5, "regex": "[ab]{9}"},
        {"temperature": 0, "max_new_tokens": 5, "min_new_tokens": 5},
    ]
    named = [*b"abc", end]
    results = pool.generate_all(
        input_ids=PROMPTS[:2], sampling_params=each, token_ids_logprob=named
    )
    for place in results[0]["meta_info"]["output_token_ids_logprobs"]:
        a, b, c, last = (value for value, *_ in place)
        assert math.exp(a) + math.exp(b) == pytest.approx(1, abs=1e-4)
        assert c == last == -math.inf
    (rows,) = output_logits(model, PROMPTS[1:2], [results[1]["output_ids"]])
    rows = np.where(np.arange(rows.shape[1]) == end, -np.inf, rows)
    places = results[1]["meta_info"]["output_token_ids_logprobs"]
    assert [place[-1][0] for place in places] == [-math.inf] * 5
    assert_named(logprobs(rows), named[:3], [place[:3] for place in places])


# Forms of a call


def test_of_one_engines_own_call(pool: EnginePool, model: Path) -> None:
    """With the names that upstream's Engine has."""
    result: Any = pool.engines[2].generate(
        input_ids=ids(30), sampling_params=GREEDY, return_logprob=True, logprob_start_len=4,
        token_ids_logprob=NAMED[1],
    )  # fmt: skip
    assert result["meta_info"]["engine_index"] == 2
    assert_outputs(model, [ids(30)], [NAMED[1]], [result])
    of_prompt(model, ids(30), 4, NAMED[1], result["meta_info"])


@pytest.mark.parametrize("given", [np.array(NAMED[1]), tuple(NAMED[1]), [NAMED[1]]])
def test_forms(pool: EnginePool, model: Path, given: Any) -> None:
    result = pool.generate(input_ids=ids(9), sampling_params=GREEDY, token_ids_logprob=given)
    assert_outputs(model, [ids(9)], [NAMED[1]], [result])


@pytest.mark.parametrize("given", [None, [], [[], None]])
def test_none(pool: EnginePool, given: Any) -> None:
    options: Any = {"input_ids": PROMPTS[:2], "sampling_params": GREEDY}
    for result in pool.generate_all(**options, token_ids_logprob=given):
        assert not any("logprobs" in name for name in result["meta_info"])


@pytest.mark.parametrize(
    ("given", "words", "prompt"),
    [
        ([1] * 65, ["token_ids_logprob has 65 ids", "at most 64", "another call"], None),
        ([[1], [1] * 65], ["token_ids_logprob has 65 ids"], 1),
        ([[1]], ["1 lists for 2 prompts", "one per prompt"], None),
        ([1, 272], ["token_ids_logprob", "272", "0 to 271"], None),
        ([[-1], []], ["token_ids_logprob", "-1", "0 to 271"], 0),
        ([1, True], ["token_ids_logprob", "True is not an integer"], None),
        ([1, [2]], ["token_ids_logprob", "[2] is not an integer"], None),
        (["1"], ["token_ids_logprob", "'1' is not an integer"], None),
        (5, ["token_ids_logprob=5", "list of token ids"], None),
        ("5", ["token_ids_logprob='5'", "list of token ids"], None),
    ],
)
def test_bad_input(pool: EnginePool, given: Any, words: list[str], prompt: int | None) -> None:
    def generate() -> None:
        pool.generate_all(input_ids=PROMPTS[:2], token_ids_logprob=given)

    def score() -> None:
        two = PROMPTS[:2]
        pool.score(input_ids=two, continuation_ids=two, token_ids_logprob=given)

    for call in (generate, score):
        refused(pool, call, *words, prompt=prompt)
