"""Which experts routed each token: those of a plain JAX Qwen3-MoE along the same tokens."""

import base64
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from enginepool import EnginePool, InvalidConfig, rl
from enginepool.engine.routed_experts import routing_of
from tests.pool.test_bad_input import refused
from tests.support import faults
from tests.support.experts import OPTIONS, PROMPTS, SAMPLED, assert_rows, rows_of, write_mixture
from tests.support.liveness import SECONDS, callers, until
from tests.support.marks import steady_decode
from tests.support.pools import SMALL, compilations, same
from tests.support.scores import ids
from tests.support.steady import several_at_once, upstreams_own


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [write_mixture(tmp_path_factory.mktemp("moe"), seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def pool(models: list[Path]) -> Iterator[EnginePool]:
    with EnginePool(str(models[0]), devices=4, **OPTIONS) as pool:
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
    """On several engines, in chunks, in launches of several steps. Others do not ask. Nothing is
    compiled."""
    others: Any = {"input_ids": PROMPTS[:3], "sampling_params": SAMPLED}
    with compilations() as seen, callers(1) as executor, several_at_once():
        plain = executor.submit(pool.generate_all, **others, return_logprob=True)
        results = ask(pool, PROMPTS, SAMPLED, return_logprob=True)
        same(results[:3], plain.result(SECONDS))
    assert seen == []
    assert not any("routed_experts" in one["meta_info"] for one in plain.result())
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert_rows(models[0], prompt, result)


@steady_decode
def test_upstreams_own_steps(one: EnginePool, models: list[Path]) -> None:
    with upstreams_own(one):
        results = ask(one, PROMPTS, SAMPLED)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert_rows(models[0], prompt, result)


def test_prefixes_that_are_cached(one: EnginePool, models: list[Path]) -> None:
    """Of a prompt, and of an output of somebody who did not ask."""
    first = ids(100, 3)
    (plain,) = one.generate_all(input_ids=[first], sampling_params=SAMPLED)
    longer = [*first, *plain["output_ids"], 5, 6]
    for prompt in (first, longer, longer):
        (result,) = ask(one, [prompt], SAMPLED)
        assert result["meta_info"]["cached_tokens"] > 90
        assert_rows(models[0], prompt, result)


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
    """Outputs of three prompts, the first tokens by the first weights."""
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
    """A row is of the weights that sampled the token behind it, also if it is computed again."""
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
    """For want of KV cache, and go on later."""
    prompts = [[100 + n, 9] for n in range(6)]
    params = {"temperature": 1.0, "max_new_tokens": 300, "min_new_tokens": 300}
    results = ask(one, prompts, params)
    assert sum(retracted) > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert_rows(models[0], prompt, result)


def test_over_a_fault(pool: EnginePool, models: list[Path]) -> None:
    """The outputs of the engine go on, on it or on others."""
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
    """Its given tokens are prefilled, and have experts too."""
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
    """It keeps its experts. A part that has none gets the current weights'."""
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
    for bad in (old[:-8], "none", 5):
        part["meta_info"]["routed_experts"] = bad
        call = lambda: ask(one, [prompt], SAMPLED, partial_outputs=[part])  # noqa: E731
        refused(one, call, "routed_experts", f"{last} positions", prompt=0)


def test_they_are_replayed(pool: EnginePool, one: EnginePool) -> None:
    """From the results alone."""
    results = ask(pool, PROMPTS, SAMPLED, return_logprob=True)
    again = rl.replay(one, results, PROMPTS, SAMPLED, version=0)
    assert again.same
    assert again.tokens == 150
    rows = rows_of(results[2]["meta_info"]).copy()
    rows[len(PROMPTS[2]) - 1 + 4] += 1  # the token at 4 was sampled from it
    results[2]["meta_info"]["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
    assert rl.replay(one, results, PROMPTS, SAMPLED, version=0).other_experts == [(2, 4)]


def test_all_is_replayed(
    pool: EnginePool, one: EnginePool, models: list[Path], own_weights: None
) -> None:
    """Without a seed, over a swap: ids, masks, experts and log-probabilities of both weights, by
    pools that have them."""
    params = {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 30, "ignore_eos": True}
    asked = {"return_logprob": True, "return_sampling_mask": True}
    results = over_a_swap(one, models, "retract", params, **asked)
    old = rl.replay(pool, results, PROMPTS, params, version=0)
    new = rl.replay(one, results, PROMPTS, params, version=1)
    assert min(old.tokens, new.tokens) > 0
    assert old.tokens + new.tokens == 90
    for again in (old, new):
        assert again.same, again
        assert again.logprob < 1e-4
        assert {"output_sampling_mask", "routed_experts"} <= set(again.results[0]["meta_info"])


def test_refusals(model_dir: Callable[[str], Path], keep_pool: Any) -> None:
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
