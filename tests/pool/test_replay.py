"""Results have everything that is needed to sample them again, on another pool with the same
weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginepool import EnginePool, InvalidRequest, rl
from tests.pool.test_sampling_masks import PROMPTS, mixed
from tests.support import faults
from tests.support.liveness import SECONDS, callers, until
from tests.support.pools import MakePool


def ask(pool: EnginePool, prompts: Any, params: Any) -> list[dict[str, Any]]:
    return pool.generate_all(
        input_ids=prompts, sampling_params=params, return_logprob=True, return_sampling_mask=True
    )


def test_on_another_pool(pool: EnginePool, make_pool: MakePool) -> None:
    """Results of four engines are replayed on one, seeded or not, with every kind of parameter."""
    prompts = [PROMPTS[index % 6] for index in range(24)]
    params = [one | {"n": 1 + index % 2} for index, one in enumerate(mixed(24, seed=1))]
    results = ask(pool, prompts, params)
    assert any("sampling_seed" not in one for one in params)
    again = rl.replay(make_pool("qwen3", 1), results, prompts, params, version=0)
    assert again.same, again.other_ids
    assert again.tokens == sum(len(result["output_ids"]) for result in results) > 1000
    assert 0 < again.logprob < 1e-4
    for index, one in enumerate(params):
        seeds = {
            result["meta_info"]["sampling_seed"]
            for result in results
            if result["meta_info"]["prompt_index"] == index
        }
        assert seeds == {one["sampling_seed"]} if "sampling_seed" in one else seeds


def test_of_two_versions(
    llama: EnginePool, make_pool: MakePool, target: Callable[[str], Path]
) -> None:
    """Each version's tokens are replayed on a pool that has that version."""
    params: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "sampling_seed": 7}
    params |= {"max_new_tokens": 150, "ignore_eos": True}
    channel = llama.runtime.workers[0].channel
    let_go = faults.hang_in_step(llama, 0, at=10)
    with callers(2) as executor:
        answer = executor.submit(ask, llama, PROMPTS[:4], params)
        assert let_go.begun.wait(SECONDS)
        swap = executor.submit(
            llama.update_weights, target("llama"), mode="retract", weight_version="new"
        )
        until(channel.has_jobs)
        let_go.set()
        swap.result(SECONDS)
        results = answer.result(SECONDS)
    new = rl.replay(llama, results, PROMPTS[:4], params, version="new")
    other = make_pool("llama", 1)
    old = rl.replay(other, results, PROMPTS[:4], params, version=0)
    assert new.same
    assert old.same
    assert min(old.tokens, new.tokens) > 0
    assert old.tokens + new.tokens == 600


def test_differences_are_reported(pool: EnginePool) -> None:
    """Other ids, another mask, another number. Also for results without log-probabilities."""
    params = {"temperature": 1.0, "top_k": 5, "max_new_tokens": 12, "ignore_eos": True}
    results = ask(pool, PROMPTS[:4], params)
    results[0]["output_ids"][5] ^= 1
    mask = results[1]["meta_info"]["output_sampling_mask"]["ids"]
    mask[7 * 5] = mask[7 * 5 + 1] - 1 if mask[7 * 5 + 1] - 1 != mask[7 * 5] else 271
    value, token, text = results[2]["meta_info"]["output_token_logprobs"][3]
    results[2]["meta_info"]["output_token_logprobs"][3] = (value - 0.5, token, text)
    again = rl.replay(pool, results, PROMPTS[:4], params, version=0)
    assert not again.same
    assert again.other_ids == [(0, 5)]
    assert again.other_masks == [(1, 7)]
    assert again.logprob == pytest.approx(0.5, abs=1e-3)
    results[3]["meta_info"]["output_token_sampling_logprobs"][3] -= 1.0
    again = rl.replay(pool, results, PROMPTS[:4], params, version=0)
    assert again.logprob == pytest.approx(1.0, abs=1e-3)


def test_missing_fields_are_named(pool: EnginePool) -> None:
    """The error names it. A call without parameters had the checkpoint's defaults, not
    upstream's."""
    params = {"temperature": 1.0, "max_new_tokens": 3}
    results = ask(pool, PROMPTS[:2], params)
    for prompts, given, words in (
        (PROMPTS[:2], None, "generation_config.json"),
        (PROMPTS[:2], [params, None], "generation_config.json"),
        (PROMPTS[:2], [params], "sampling_params has no entry 1"),
        (PROMPTS[:1], params, "prompts has no entry 1"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            rl.replay(pool, results, prompts, given, version=0)  # pyright: ignore
    del results[1]["meta_info"]["output_token_logprobs"]
    with pytest.raises(InvalidRequest, match="return_logprob=True"):
        rl.replay(pool, results, PROMPTS[:2], params, version=0)
