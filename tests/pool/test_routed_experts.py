"""The experts of each token are those of a plain JAX Qwen3-MoE along the same tokens."""

import base64
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from string import ascii_letters
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from enginepool import EnginePool, InvalidConfig, rl
from enginepool.engine.routed_experts import routing_of
from tests.engine.test_joins import Order
from tests.pool.test_bad_input import refused
from tests.support import faults
from tests.support.experts import (
    OPTIONS,
    PROMPTS,
    SAMPLED,
    alike,
    assert_rows,
    first_of,
    rows_of,
    write_mixture,
)
from tests.support.liveness import SECONDS, callers, until, waiting
from tests.support.marks import steady_decode
from tests.support.masks import assert_masks
from tests.support.pools import SMALL, compilations, same
from tests.support.scores import ids
from tests.support.steady import several_at_once, upstreams_own


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [write_mixture(tmp_path_factory.mktemp("moe"), seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def pool(models: list[Path]) -> Iterator[EnginePool]:
    with EnginePool(str(models[0]), devices=2, **OPTIONS) as pool:
        yield pool


@pytest.fixture(scope="module")
def one(models: list[Path]) -> Iterator[EnginePool]:
    with EnginePool(str(models[0]), devices=1, **OPTIONS) as pool:
        yield pool


@pytest.fixture
def own_weights(one: EnginePool, models: list[Path]) -> Iterator[None]:
    yield
    one.update_weights(models[0], weight_version=0)


def ask(pool: EnginePool, prompts: Sequence[list[int]], params: Any, **options: Any) -> list[Any]:
    return pool.generate_all(
        input_ids=prompts, sampling_params=params, return_routed_experts=True, **options
    )


def test_prompts_and_outputs(pool: EnginePool, models: list[Path]) -> None:
    """On several engines, in chunks, in launches of several steps, beside requests that do not
    want experts. Nothing is compiled."""
    others: Any = {"input_ids": PROMPTS[:3], "sampling_params": SAMPLED}
    with compilations() as seen, callers(1) as executor, several_at_once():
        plain = executor.submit(pool.generate_all, **others, return_logprob=True)
        results = ask(pool, PROMPTS, SAMPLED, return_logprob=True)
        same(results[:3], plain.result(SECONDS))
    assert seen == []
    assert not any("routed_experts" in one["meta_info"] for one in plain.result())
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert_rows(models[0], prompt, result)


@pytest.mark.slow
@steady_decode
def test_upstreams_own_steps(one: EnginePool, models: list[Path]) -> None:
    with upstreams_own(one):
        results = ask(one, PROMPTS, SAMPLED)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert_rows(models[0], prompt, result)


def test_prefixes_that_are_cached(one: EnginePool, models: list[Path]) -> None:
    """From a prompt, and from the output of a request that wanted no experts."""
    first = ids(100, 3)
    (plain,) = one.generate_all(input_ids=[first], sampling_params=SAMPLED)
    longer = [*first, *plain["output_ids"], 5, 6]
    for prompt in (first, longer, longer):
        (result,) = ask(one, [prompt], SAMPLED)
        assert result["meta_info"]["cached_tokens"] > 90
        assert_rows(models[0], prompt, result)


@steady_decode
def test_a_request_that_joins(
    one: EnginePool, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It joins steps in flight and wants nothing else."""
    late = ids(30, 8)
    order = Order(one, late, monkeypatch)
    with callers(2) as executor:
        first = executor.submit(ask, one, PROMPTS[:2], SAMPLED | {"max_new_tokens": 100})
        assert order.reached.wait(SECONDS)
        second = executor.submit(ask, one, [late], SAMPLED)
        until(lambda: waiting(one) == 1)
        order.go_on.set()
        results = [*first.result(SECONDS), *second.result(SECONDS)]
    for prompt, result in zip([*PROMPTS[:2], late], results, strict=True):
        assert_rows(models[0], prompt, result)
    longer = [*late, *results[-1]["output_ids"], 5]  # whose KV cache exists
    (again,) = ask(one, [longer], SAMPLED)
    assert again["meta_info"]["cached_tokens"] > 50
    assert_rows(models[0], longer, again)


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_over_a_pause(one: EnginePool, models: list[Path], mode: Any) -> None:
    channel = one.runtime.workers[0].channel
    let_go = faults.hang_in_step(one, 0, at=10)
    with callers(2) as executor:
        answer = executor.submit(ask, one, PROMPTS[:3], SAMPLED)
        assert let_go.begun.wait(SECONDS)
        pause = executor.submit(one.pause_generation, mode)
        until(channel.has_jobs)
        let_go.set()
        pause.result(SECONDS)
        one.continue_generation()
        results = answer.result(SECONDS)
    for prompt, result in zip(PROMPTS[:3], results, strict=True):
        assert_rows(models[0], prompt, result)
    assert any(len(result["output_ids"]) < 30 for result in results) == (mode == "abort")


def over_a_swap(
    one: EnginePool, models: list[Path], mode: Any, params: Any, **options: Any
) -> list[Any]:
    """Outputs of three prompts. Their first tokens are of the first weights."""
    one.flush_cache()
    channel = one.runtime.workers[0].channel
    let_go = faults.hang_in_step(one, 0, at=6)  # four of them prefill
    with callers(2) as executor:
        answer = executor.submit(ask, one, PROMPTS[:3], params, **options)
        assert let_go.begun.wait(SECONDS)
        swap = executor.submit(one.update_weights, models[1], mode=mode, weight_version=1)
        until(channel.has_jobs)
        let_go.set()
        swap.result(SECONDS)
        return answer.result(SECONDS)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_over_a_swap(one: EnginePool, models: list[Path], own_weights: None, mode: Any) -> None:
    """Each row is of the weights that sampled the next token, also if it is computed again."""
    results = over_a_swap(one, models, mode, SAMPLED)
    for prompt, result in zip(PROMPTS[:3], results, strict=True):
        (_, end, _), _ = result["meta_info"]["weight_versions"]
        last_of_old = len(prompt) + end - 1
        assert_rows(models[0], prompt, result, end=last_of_old)
        if mode == "retract":
            assert_rows(models[1], prompt, result, start=last_of_old)


def test_outputs_that_are_retracted(
    one: EnginePool, models: list[Path], retracted: list[int]
) -> None:
    """For lack of KV cache. They resume later. With this seed, no token has two experts whose
    probabilities differ by less than 5e-5."""
    prompts = [[100 + n, 9] for n in range(6)]
    params = {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": 300, "min_new_tokens": 300}
    results = ask(one, prompts, params)
    assert sum(retracted) > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert_rows(models[0], prompt, result)


def test_over_a_fault(pool: EnginePool, models: list[Path]) -> None:
    """The engine's outputs continue, on this engine or on others."""
    before = len(pool.events())
    faults.raise_in_step(pool, 1, at=4)
    results = ask(pool, PROMPTS * 3, SAMPLED | {"sampling_seed": 4})

    def kinds() -> list[str]:
        return [event["event"] for event in pool.events()[before:]]

    until(lambda: "engine_recovered" in kinds())
    assert "engine_quarantined" in kinds()
    for prompt, result in zip(PROMPTS * 3, results, strict=True):
        assert result["meta_info"]["finish_reason"]["type"] == "length"
        assert_rows(models[0], prompt, result)


def test_an_output_that_goes_on(pool: EnginePool, models: list[Path]) -> None:
    """The tokens of its part are prefilled and have experts, too."""
    (whole,) = ask(pool, PROMPTS[:1], SAMPLED, return_logprob=True)
    part = {
        "output_ids": whole["output_ids"][:9],
        "meta_info": {
            "output_token_logprobs": whole["meta_info"]["output_token_logprobs"][:9],
        },
    }
    options: Any = {"return_logprob": True, "partial_outputs": [part]}
    (result,) = ask(pool, PROMPTS[:1], SAMPLED, **options)
    assert result["output_ids"] == whole["output_ids"]
    assert_rows(models[0], PROMPTS[0], result)


def test_a_part_of_other_weights(one: EnginePool, models: list[Path], own_weights: None) -> None:
    """The part keeps its experts. A part without experts gets those of the current weights."""
    prompt = PROMPTS[2]
    (whole,) = ask(one, [prompt], SAMPLED)
    last = len(prompt) + 9 - 1
    old = base64.b64encode(rows_of(whole["meta_info"])[:last].tobytes()).decode()
    one.update_weights(models[1], weight_version=1)
    part: dict[str, Any] = {"output_ids": whole["output_ids"][:9], "meta_info": {}}
    (bare,) = ask(one, [prompt], SAMPLED, partial_outputs=[part])
    part["meta_info"]["routed_experts"] = old
    (kept,) = ask(one, [prompt], SAMPLED, partial_outputs=[part])
    assert_rows(models[1], prompt, bare)
    assert_rows(models[0], prompt, kept, end=last)
    assert_rows(models[1], prompt, kept, start=last)
    for bad in (old[:-8], "none", 5, np.array([1, 2])):
        part["meta_info"]["routed_experts"] = bad
        call = lambda: ask(one, [prompt], SAMPLED, partial_outputs=[part])  # noqa: E731
        refused(one, call, "routed_experts", f"{last} positions", prompt=0)


SHORT: list[dict[str, Any]] = [
    {"max_new_tokens": 1, "top_k": 5},
    {"stop": [*ascii_letters], "top_p": 0.9},
    {"regex": "[a-f]{9,}", "min_p": 0.1},
    {"top_k": 1, "temperature": 0.7, "presence_penalty": 2.0, "frequency_penalty": -0.5},
    {"top_p": 0.6, "top_k": 40, "min_new_tokens": 9},
]


def test_with_masks_of_any_output(one: EnginePool, models: list[Path]) -> None:
    """For several samples, one token, an output cut by a stop string, a grammar, and penalties.
    They are the same in a stream and after resuming."""
    params = [{"temperature": 1.0, "max_new_tokens": 9, "sampling_seed": 4} | own for own in SHORT]
    asked: Any = {"return_sampling_mask": True, "return_routed_experts": True}
    results = one.generate_all(None, [own | {"n": 2} for own in params], input_ids=PROMPTS, **asked)
    metas = [result["meta_info"] for result in results]
    of = [meta["prompt_index"] for meta in metas]
    prompts, given = [PROMPTS[index] for index in of], [params[index] for index in of]
    allowed = {*b"abcdef"}
    end = one.engines[0].tokenizer_manager.tokenizer.eos_token_id

    def banned(_: Any, own: dict[str, Any], place: int) -> list[int]:
        if "regex" in own:
            return [token for token in range(272) if token not in allowed]
        return [end] if place < own.get("min_new_tokens", 0) else []

    assert assert_masks(models[0], prompts, given, results, banned) > 40
    for prompt, result in zip(prompts, results, strict=True):
        assert_rows(models[0], prompt, result)
    assert {len(result["output_ids"]) for result in results[:2]} == {1}
    assert any(isinstance(meta["finish_reason"].get("matched"), str) for meta in metas[2:4])

    chunks = list(one.stream(None, [own | {"n": 2} for own in params], input_ids=PROMPTS, **asked))
    last = {chunk["index"]: chunk for chunk in chunks}
    alike(results, [last[index] for index in range(10)])
    assert not any(
        "routed_experts" in chunk["meta_info"]
        for chunk in chunks
        if chunk["meta_info"]["finish_reason"] is None
    )
    again = one.generate_all(
        None, given, input_ids=prompts, prompt_indices=of, sample_indices=[0, 1] * 5,
        partial_outputs=[first_of(*both) for both in zip(prompts, results, strict=True)], **asked,
    )  # fmt: skip
    alike(results, again)


def test_experts_are_replayed(pool: EnginePool, one: EnginePool) -> None:
    """From the results alone."""
    results = ask(pool, PROMPTS, SAMPLED, return_logprob=True)
    again = rl.replay(one, results, PROMPTS, SAMPLED, version=0)
    assert again.same
    assert again.tokens == 150
    rows = rows_of(results[2]["meta_info"]).copy()
    rows[len(PROMPTS[2]) - 1 + 4] += 1  # the token at 4 was sampled from it
    results[2]["meta_info"]["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
    assert rl.replay(one, results, PROMPTS, SAMPLED, version=0).other_experts == [(2, 4)]
    for result in results:
        del result["meta_info"]["routed_experts"]
    without = ask(pool, PROMPTS, SAMPLED, return_logprob=True, partial_outputs=results)
    assert {result["meta_info"]["routed_experts"] for result in without} == {""}
    assert rl.replay(one, without, PROMPTS, SAMPLED, version=0).same


def test_everything_is_replayed(
    pool: EnginePool, one: EnginePool, models: list[Path], own_weights: None
) -> None:
    """After a swap, with and without a seed: ids, masks, experts and log-probabilities of both
    weights, by other pools that have them."""
    common = {"temperature": 0.8, "max_new_tokens": 30}
    params: list[dict[str, Any]] = [
        {"top_p": 0.9, "ignore_eos": True, "n": 2},
        {"top_k": 5, "min_new_tokens": 30, "frequency_penalty": 0.5, "sampling_seed": 3},
        {"regex": "[a-f]{30,}", "min_p": 0.05},
    ]
    params = [common | given for given in params]
    asked = {"return_logprob": True, "return_sampling_mask": True}
    results = over_a_swap(one, models, "retract", params, **asked)
    assert [len(result["output_ids"]) for result in results] == [30] * 4
    with EnginePool(str(models[1]), devices=2, **OPTIONS) as fresh:
        new = rl.replay(fresh, results, PROMPTS, params, version=1)
    old = rl.replay(pool, results, PROMPTS, params, version=0)
    assert old.tokens + new.tokens == 120
    for again in (old, new):
        assert again.same, again
        assert {meta["prompt_index"] for meta in metas_of(again)} == {0, 1, 2}
        assert again.logprob < 1e-4
        assert all(
            {"output_sampling_mask", "routed_experts"} <= {*meta} for meta in metas_of(again)
        )
    assert rl.replay(pool, results, PROMPTS, params, version=1).other_ids


def metas_of(again: rl.Replay) -> list[dict[str, Any]]:
    return [result["meta_info"] for result in again.results]


def test_refusals(one: EnginePool, model_dir: Callable[[str], Path], keep_pool: Any) -> None:
    scored: Any = {"sampling_params": {"max_new_tokens": 0}, "return_prompt_logprob": True}
    refused(
        one, lambda: one.generate_all(input_ids=[[5]], return_routed_experts=True, **scored),
        "max_new_tokens=0", "max_new_tokens=1", prompt=0,
    )  # fmt: skip
    plain = keep_pool("qwen3", 4)
    refused(
        plain, lambda: plain.generate_all(input_ids=[[5]], return_routed_experts=True),
        "return_routed_experts=True", "enable_return_routed_experts=True", prompt=None,
    )  # fmt: skip
    dense = EnginePool(
        str(model_dir("qwen3")), devices=1, enable_return_routed_experts=True, **SMALL
    )
    with pytest.raises(InvalidConfig, match="no experts"):
        dense.open()
    with pytest.raises(InvalidConfig, match="moe_backend='fused'"):
        routing_of([None, None], np.dtype(np.uint8), SimpleNamespace(moe_backend="fused"))
