"""Sampling parameters are checked, and every sample has its own random stream."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginepool import EnginePool, InvalidRequest
from enginepool.frontend.sampling import Seeds, make_sampling
from tests.support.marks import slow
from tests.support.pools import MakePool

INT32 = st.integers(-(2**31), 2**31 - 1)
SAMPLED = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True}


def outputs(results: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    return [tuple(result["output_ids"]) for result in results]


@given(INT32)
def test_derived_seeds_differ_within_a_call(seed: int):
    """No two samples of a call share a seed, whatever seed the caller gives."""
    made = [Seeds.derived(seed, prompt, sample) for prompt in range(40) for sample in range(40)]
    assert len(set(made)) == len(made)
    assert all(-(2**31) <= one < 2**31 for one in made)


def test_derived_seeds_differ_in_large_calls():
    """For 20,000 prompts, and for 20,000 samples of one."""
    made = {Seeds.derived(42, prompt, 0) for prompt in range(20_000)}
    made |= {Seeds.derived(42, 0, sample) for sample in range(1, 20_000)}
    assert len(made) == 39_999


@given(INT32, INT32)
def test_derived_seeds_of_two_callers_seeds_differ(one: int, other: int):
    """The first samples of two calls share a seed only if the calls have the same seed."""
    assert (Seeds.derived(one, 0, 0) == Seeds.derived(other, 0, 0)) == (one == other)
    assert Seeds.given(Seeds.derived(one, 7, 3), 7, 3) == one


def test_fresh_seeds_never_repeat():
    """Within a pool. Two pools start at different seeds."""
    seeds, others = Seeds(), Seeds()
    made = {seeds.fresh() for _ in range(20_000)}
    assert len(made) == 20_000
    assert [others.fresh() for _ in range(4)] != [Seeds().fresh() for _ in range(4)]


@pytest.mark.parametrize("engines", [1, *slow(2)])
def test_same_seed_gives_the_same_samples_from_any_number_of_engines(
    make_pool: MakePool, engines: int
):
    """They depend on the seed, the prompt index and the sample index, not on engines, other
    requests or earlier calls."""
    prompts = ["a", "bcd", "你是谁", "x" * 70]
    sampling = SAMPLED | {"sampling_seed": 11, "n": 4}
    four = make_pool("qwen3", 4)
    expected = outputs(four.generate_all(prompts, sampling))
    assert len(set(expected)) == len(expected)
    pool = make_pool("qwen3", engines, warmup="none")
    assert outputs(pool.generate_all(prompts, sampling)) == expected
    # Beside other requests, which change the batches.
    each = [sampling] * 4 + [SAMPLED | {"max_new_tokens": 5 + i} for i in range(8)]
    together = four.generate_all(prompts + ["z" * i for i in range(1, 9)], each)
    assert outputs(together)[:16] == expected
    # A sample is the same if there are fewer samples.
    fewer = four.generate_all(prompts[:2], sampling | {"n": 2})
    assert outputs(fewer) == [expected[i] for i in (0, 1, 4, 5)]


def test_another_seed_gives_other_samples(pool: EnginePool):
    """Also a seed that differs in a single bit, and a negative one."""
    prompts = ["a", "b"]
    seen = [
        tuple(outputs(pool.generate_all(prompts, SAMPLED | {"sampling_seed": seed})))
        for seed in (0, 1, -1, 2**31 - 1, -(2**31))
    ]
    assert len(set(seen)) == 5


def test_equal_prompts_of_a_seeded_call_get_their_own_samples(pool: EnginePool):
    """A sample also depends on the prompt's index."""
    results = pool.generate_all(["a"] * 8, SAMPLED | {"sampling_seed": 5})
    assert len(set(outputs(results))) == 8


def test_unseeded_samples_differ_across_engines_and_calls(pool: EnginePool):
    """Sixteen samples of a prompt on all engines, and those of a second call: no two are equal."""
    first = pool.generate_all("a", SAMPLED | {"n": 16})
    second = pool.generate_all(["a"] * 16, SAMPLED)
    assert {result["meta_info"]["engine_index"] for result in first} == {0, 1, 2, 3}
    assert len(set(outputs(first + second))) == 32


def test_parameters_apply_each_to_its_prompt(pool: EnginePool):
    """top_k=1 chooses what temperature 0 does, beside prompts that really sample."""
    each = [SAMPLED | {"top_k": 1}, SAMPLED, SAMPLED | {"temperature": 0}, SAMPLED]
    results = outputs(pool.generate_all(["a"] * 4, each))
    assert results[0] == results[2]
    assert len(set(results)) == 3


def test_harmless_values_are_accepted():
    """None means not given. A parameter that upstream ignores may have its neutral value."""
    made = make_sampling(
        {"temperature": None, "repetition_penalty": 1.0, "logit_bias": {}, "top_k": -1, "n": 3},
        vocab_size=272,
        tokenizer=None,
    )
    assert (made.n, made.seed, made.explicit_length) == (3, None, False)
    assert make_sampling({"sampling_seed": 0}, vocab_size=272, tokenizer=None).seed == 0


def test_some_token_must_be_left_to_sample(pool: EnginePool) -> None:
    """Stop ids may not be the whole vocabulary: all logits would be masked, and NaN resets
    engines. If one id is left, it is sampled."""
    size = pool.runtime.input_processor.limits.vocab_size
    everything = {"min_new_tokens": 2, "max_new_tokens": 2, "stop_token_ids": list(range(size))}
    with pytest.raises(InvalidRequest, match="no token may be sampled; leave one out"):
        pool.generate(input_ids=[5], sampling_params=everything)
    left = everything | {"stop_token_ids": list(range(1, size)), "temperature": 0}
    assert pool.generate(input_ids=[5], sampling_params=left)["output_ids"] == [0, 0]
