"""Log-probabilities of given tokens are the reference's, for every family, length and form of
call."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import jax
import numpy as np
import pytest

from enginepool import EnginePool, toy
from enginepool.engine import score_head
from tests.pool.test_bad_input import refused
from tests.support.forced import LOGPROB_TOLERANCE
from tests.support.liveness import at_rest, until
from tests.support.marks import slow
from tests.support.pools import NATIVE_PAGES, SMALL, MakePool, compilations
from tests.support.reference import make_random_model
from tests.support.scores import assert_prompt_logprobs, assert_scores, chosen, ids, reference

ModelDir = Callable[[str], Path]
CONTEXT = 512
# Of prompt and continuation: at the edges of chunks (64 tokens), up to the context's length.
LENGTHS = [(1, 1), (1, 63), (1, 64), (2, 63), (63, 1), (64, 1), (65, 2), (30, 98), (128, 1)]
LENGTHS += [(1, 200), (200, 1), (1, CONTEXT - 1), (CONTEXT - 1, 1), (300, CONTEXT - 300)]
GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}


@pytest.mark.parametrize("family", slow("llama", "gemma2", "qwen2", "qwen3", "qwen3_moe"))
def test_families(tmp_path: Path, family: str) -> None:
    """Within 1e-4 of the plain forward pass, together and alone, and nothing is compiled.

    (With these weights a reference in float32 differs from one in float64 by at most 3e-5 after 500
    tokens. With the weights of other tests it differs by half of the tolerance.)
    """
    model = make_random_model(tmp_path, family, seed=1, std=0.1)
    prompts, continuations = ([ids(pair[i], seed=i) for pair in LENGTHS] for i in (0, 1))
    with EnginePool(str(model), devices=2, **SMALL) as pool:
        with compilations() as seen:
            results = pool.score(input_ids=prompts, continuation_ids=continuations)
            alone = pool.score(input_ids=prompts[7], continuation_ids=continuations[7])
        assert seen == []
        until(lambda: at_rest(pool))
    assert_scores(model, prompts, continuations, results)
    assert isinstance(alone, dict)
    assert alone["logprobs"] == pytest.approx(results[7]["logprobs"], abs=LOGPROB_TOLERANCE)


def test_every_engine_has_a_part(pool: EnginePool, model_dir: ModelDir) -> None:
    prompts, continuations = [ids(40, n) for n in range(40)], [ids(3, n) for n in range(40)]
    results = pool.score(input_ids=prompts, continuation_ids=continuations)
    assert_scores(model_dir("qwen3"), prompts, continuations, results)
    assert {result["meta_info"]["engine_index"] for result in results} == {0, 1, 2, 3}


@pytest.mark.slow
def test_one_engine_on_two_devices(make_pool: MakePool, model_dir: ModelDir) -> None:
    """The vocabulary is sharded over both. The most probable tokens are of all of it."""
    pool = make_pool("llama", 1, tp_size=2)
    prompts, continuations = [ids(90), ids(3)], [ids(20, 1), ids(70, 1)]
    with compilations() as seen:
        results = pool.score(input_ids=prompts, continuation_ids=continuations, top_logprobs_num=3)
    assert seen == []
    assert_scores(model_dir("llama"), prompts, continuations, results)
    assert_top(model_dir("llama"), prompts, continuations, results, 3)


@pytest.mark.skipif(not NATIVE_PAGES, reason="this upstream's native attention knows no pages")
@pytest.mark.slow
def test_pages(make_pool: MakePool, model_dir: ModelDir) -> None:
    pool = make_pool("qwen3", 1, page_size=16)
    prompts, continuations = ([ids(pair[i], seed=i) for pair in LENGTHS] for i in (0, 1))
    results = pool.score(input_ids=prompts, continuation_ids=continuations)
    assert_scores(model_dir("qwen3"), prompts, continuations, results)
    until(lambda: at_rest(pool))


@pytest.mark.slow
def test_several_buckets(make_pool: MakePool) -> None:
    """The first prompt after warm-up may need any of them."""
    pool = make_pool("toy", 1, precompile_token_paddings=[8, 16, 32, 64])
    prompts = [ids(length) for length in (1, 4, 10, 19, 49, 99)]
    continuation = ids(2, 1)
    with compilations() as seen:
        results = [pool.score(input_ids=p, continuation_ids=continuation) for p in prompts]
    assert seen == []
    for prompt, result in zip(prompts, results, strict=True):
        assert_scores(toy.checkpoint(), [prompt], [continuation], [result])


def assert_top(
    model: Path, prompts: Any, continuations: Any, results: list[dict[str, Any]], k: int
) -> None:
    expected = reference(model, prompts, continuations)
    for rows, continuation, result in zip(expected, continuations, results, strict=True):
        assert len(result["top_logprobs"]) == len(continuation)
        for row, top in zip(rows, result["top_logprobs"], strict=True):
            values = [value for value, *_ in top]
            assert values == pytest.approx(np.sort(row)[::-1][:k], abs=LOGPROB_TOLERANCE)
            assert [row[i] for _, i, _ in top] == pytest.approx(values, abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("k", [1, 20])
def test_most_probable_tokens(pool: EnginePool, model_dir: ModelDir, k: int) -> None:
    prompts, continuations = [ids(5), ids(100)], [ids(80, 1), ids(2, 1)]
    results = pool.score(input_ids=prompts, continuation_ids=continuations, top_logprobs_num=k)
    assert_scores(model_dir("qwen3"), prompts, continuations, results)
    assert_top(model_dir("qwen3"), prompts, continuations, results, k)
    assert "top_logprobs" not in pool.score(input_ids=ids(5), continuation_ids=ids(2))


def test_logits_are_made_a_slice_at_a_time(
    monkeypatch: pytest.MonkeyPatch, model_dir: ModelDir
) -> None:
    """Never more than the limit, on which the values do not depend. Slices that nobody wants are
    skipped."""
    rows, vocabulary = 16, 272
    monkeypatch.setattr(score_head, "LOGITS_BYTES", 4 * rows * vocabulary)
    lowered: list[str] = []
    jit = jax.jit

    def noting(function: Any = None, **options: Any) -> Any:
        jitted = jit(function, **options)
        if getattr(function, "__name__", "") != "prefill":
            return jitted

        def call(*args: Any) -> Any:
            lowered.append(jitted.lower(*args).as_text())
            return jitted(*args)

        return call

    monkeypatch.setattr(
        jax,
        "jit",
        lambda *args, **options: (
            noting(*args, **options) if args else (lambda f: noting(f, **options))
        ),
    )
    options = SMALL | {"max_running_requests": 32, "precompile_bs_paddings": [32], "warmup": "none"}
    with EnginePool(str(model_dir("qwen3")), devices=1, **options) as pool:
        assert pool.runtime.input_processor.limits.vocab_size == vocabulary
        prompts, continuations = [ids(1), ids(200)], [ids(150, 1), ids(1, 1)]
        results = pool.score(input_ids=prompts, continuation_ids=continuations, top_logprobs_num=2)
    assert_scores(model_dir("qwen3"), prompts, continuations, results)
    assert_top(model_dir("qwen3"), prompts, continuations, results, 2)
    assert lowered
    for text in lowered:
        assert f"tensor<{rows}x{vocabulary}xf32>" in text
        assert f"tensor<64x{vocabulary}xf32>" not in text


# Forms of a call


def test_texts(make_pool: MakePool) -> None:
    """A continuation is tokenized by itself and appended. A single prompt may have several."""
    pool = make_pool("toy", 2)
    tokenizer = pool.runtime.input_processor.tokenizer
    lone = pool.score("12+7=", "19")
    assert isinstance(lone, dict)
    several = pool.score("12+7=", ["19", "20", "1"])
    prompt, *rest = tokenizer.encode(["12+7=", "19", "20", "1"])
    assert_scores(toy.checkpoint(), [prompt] * 3, rest, several)
    assert several[0]["logprobs"] == pytest.approx(lone["logprobs"], abs=LOGPROB_TOLERANCE)
    assert sum(several[0]["logprobs"]) > -0.1 > sum(several[1]["logprobs"])
    mixed = pool.score(["12+7=", "1+1="], continuation_ids=[rest[0], rest[2]])
    assert mixed[0]["logprobs"] == pytest.approx(lone["logprobs"], abs=LOGPROB_TOLERANCE)
    assert isinstance(pool.score(["12+7="], ["19"]), list)
    assert pool.score([], []) == []


def test_what_a_result_says(pool: EnginePool) -> None:
    result = pool.score(input_ids=ids(7), continuation_ids=ids(3))
    meta = result["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["continuation_tokens"]) == (7, 3)
    assert meta["weight_version"] == pool.stats()["weight_version"]
    assert meta["e2e_latency"] > 0


def test_numpy_and_jax_ids(pool: EnginePool) -> None:
    expected = pool.score(input_ids=ids(7), continuation_ids=ids(3))["logprobs"]
    given = np.array([ids(7)] * 2), jax.numpy.array([ids(3)] * 2)
    for result in pool.score(input_ids=given[0], continuation_ids=given[1]):
        assert result["logprobs"] == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
        assert {type(value) for value in result["logprobs"]} == {float}


def test_async_twin(pool: EnginePool) -> None:
    expected = pool.score(input_ids=[ids(7)], continuation_ids=[ids(3)], top_logprobs_num=1)

    async def ask() -> Any:
        return await pool.async_score(
            input_ids=[ids(7)], continuation_ids=[ids(3)], top_logprobs_num=1
        )

    for backend in ("asyncio", "trio"):
        result = anyio.run(ask, backend=backend)
        assert result[0]["logprobs"] == pytest.approx(expected[0]["logprobs"], abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words", "prompt"),
    [
        ({}, ["prompts or input_ids"], None),
        ({"prompts": "a"}, ["continuations or continuation_ids"], None),
        ({"prompts": "a", "continuations": "b", "continuation_ids": [1]}, ["not both"], None),
        ({"prompts": ["a", "b"], "continuations": ["c"]}, ["1 continuations for 2 prompts"], None),
        ({"prompts": ["a", "b"], "continuations": "c"}, ["one per prompt"], None),
        ({"prompts": ["a", ""], "continuations": ["b"] * 2}, ["prompt is empty"], 1),
        ({"prompts": ["a"] * 2, "continuations": ["b", ""]}, ["continuation is empty"], 1),
        ({"input_ids": [[1]], "continuation_ids": [[272]]}, ["272", "0 to 271"], 0),
        ({"input_ids": [[-1]], "continuation_ids": [[1]]}, ["-1", "outside"], 0),
        ({"input_ids": [[1]], "continuation_ids": [[1.5]]}, ["continuation_ids", "1.5"], 0),
        (
            {"input_ids": [[1] * 500], "continuation_ids": [[1] * 13]},
            ["500", "13", "at most 512 together", "context_length=512", "shorten"],
            0,
        ),
        (
            {"prompts": "a", "continuations": "b", "top_logprobs_num": 21},
            ["top_logprobs_num=21", "0 to 20"],
            None,
        ),
        ({"prompts": "a", "continuations": "b", "timeout": 0}, ["timeout=0"], None),
        ({"prompts": "a", "continuations": "b", "raise_on_error": 1}, ["raise_on_error=1"], None),
    ],
)
def test_bad_input(
    pool: EnginePool, arguments: dict[str, Any], words: list[str], prompt: int | None
) -> None:
    refused(pool, lambda: pool.score(**arguments), *words, prompt=prompt)


def test_a_small_kv_cache_is_the_limit(make_pool: MakePool, model_dir: ModelDir) -> None:
    """All of it can be used, because nothing follows the last token."""
    pool = make_pool("qwen3", 1, max_total_tokens=128, warmup="none")
    results = [pool.score(input_ids=ids(100), continuation_ids=ids(29, 1))]
    assert_scores(model_dir("qwen3"), [ids(100)], [ids(29, 1)], results)
    too_long = lambda: pool.score(input_ids=ids(100), continuation_ids=ids(30))  # noqa: E731
    refused(pool, too_long, "at most 129 together", "max_total_tokens=128", prompt=0)


# With what is generated


@pytest.mark.parametrize("length", [1, 2, 64, 65, 300])
def test_prompt_of_an_output(pool: EnginePool, model_dir: ModelDir, length: int) -> None:
    prompt = ids(length)
    plain = pool.generate(input_ids=prompt, sampling_params=GREEDY)
    result = pool.generate(input_ids=prompt, sampling_params=GREEDY, return_prompt_logprob=True)
    assert result["output_ids"] == plain["output_ids"]
    assert_prompt_logprobs(model_dir("qwen3"), prompt, result["meta_info"])
    assert result["meta_info"]["input_logprobs_weight_version"] == 0
    assert not any(name.startswith("input_") for name in plain["meta_info"])


def test_prompt_of_every_sample(pool: EnginePool, model_dir: ModelDir) -> None:
    """Each sample has the values, with the most probable ids, from its own start on."""
    prompts = [ids(30), ids(90)]
    results = pool.generate_all(
        input_ids=prompts,
        sampling_params={"max_new_tokens": 3, "n": 6},
        return_prompt_logprob=True,
        logprob_start_len=[0, 80],
        top_logprobs_num=2,
    )
    for result in results:
        meta = result["meta_info"]
        prompt = prompts[meta["prompt_index"]]
        assert_prompt_logprobs(model_dir("qwen3"), prompt, meta)
        assert meta["logprob_start_len"] == [0, 80][meta["prompt_index"]]
        top = meta["input_top_logprobs"]
        assert len(top) == len(meta["input_token_logprobs"])
        for (value, *_), best in zip(meta["input_token_logprobs"], top, strict=True):
            assert (best is None) == (value is None)
            assert best is None or best[0][0] >= value - LOGPROB_TOLERANCE


def test_prompts_of_no_output(pool: EnginePool, model_dir: ModelDir) -> None:
    """`max_new_tokens` of 0 gives the values only, for more samples than an engine holds at a
    time, and for a prompt that fills the context."""
    prompts = [ids(30), ids(CONTEXT), ids(1)]
    results = pool.generate_all(
        input_ids=prompts,
        sampling_params=[{"max_new_tokens": 0, "n": n} for n in (40, 1, 2)],
        return_prompt_logprob=True,
    )
    assert [result["meta_info"]["prompt_index"] for result in results] == [0] * 40 + [1, 2, 2]
    for result in results:
        meta = result["meta_info"]
        assert (result["text"], result["output_ids"]) == ("", [])
        assert meta["finish_reason"]["type"] == "length"
    for index in (0, 39, 40, 41, 42):
        meta = results[index]["meta_info"]
        assert_prompt_logprobs(model_dir("qwen3"), prompts[meta["prompt_index"]], meta)
    until(lambda: at_rest(pool))


def test_prompt_of_one_engines_own_call(pool: EnginePool, model_dir: ModelDir) -> None:
    """With the names that upstream's Engine has."""
    result: Any = pool.engines[1].generate(
        input_ids=ids(30), sampling_params=GREEDY, return_logprob=True, logprob_start_len=4
    )
    assert result["meta_info"]["engine_index"] == 1
    assert_prompt_logprobs(model_dir("qwen3"), ids(30), result["meta_info"])


def test_prompt_of_a_stream_and_of_a_chat(make_pool: MakePool) -> None:
    """A stream has them in its last chunk."""
    pool = make_pool("toy", 2)
    *chunks, last = pool.stream("12+7=", GREEDY, return_prompt_logprob=True)
    prompt = pool.runtime.input_processor.tokenizer.encode(["12+7="])[0]
    assert_prompt_logprobs(toy.checkpoint(), prompt, last["meta_info"])
    assert not any("input_token_logprobs" in chunk["meta_info"] for chunk in chunks)
    (done,) = pool.as_completed(["12+7="], GREEDY, return_prompt_logprob=True)
    assert_prompt_logprobs(toy.checkpoint(), prompt, done["meta_info"])


@pytest.mark.parametrize(
    ("options", "words", "prompt"),
    [
        ({"logprob_start_len": 1}, ["logprob_start_len=1", "return_prompt_logprob=True"], None),
        ({"return_prompt_logprob": 1}, ["return_prompt_logprob=1", "True or False"], None),
        (
            {"return_prompt_logprob": True, "logprob_start_len": 2},
            ["logprob_start_len=2", "0 to 1"],
            1,
        ),
        ({"return_prompt_logprob": True, "logprob_start_len": -1}, ["-1", "0 to 2"], 0),
        ({"return_prompt_logprob": True, "logprob_start_len": [0]}, ["1 entries for 2"], None),
    ],
)
def test_bad_options(
    pool: EnginePool, options: dict[str, Any], words: list[str], prompt: int | None
) -> None:
    def call() -> None:
        pool.generate_all(input_ids=[[1, 2, 3], [1, 2]], **options)

    refused(pool, call, *words, prompt=prompt)


def test_reference_is_independent(model_dir: ModelDir) -> None:
    """The values of a prompt's tokens differ from those of its neighbours."""
    rows = reference(model_dir("qwen3"), [ids(10)], [ids(5, 1)])[0]
    shifted = chosen(np.roll(rows, 1, axis=0), ids(5, 1))
    assert np.abs(chosen(rows, ids(5, 1)) - shifted).max() > 100 * LOGPROB_TOLERANCE


def test_scores_equal_samples_in_bfloat16(make_pool: MakePool) -> None:
    """Logits are rounded as in a decode step, so nearly all values are equal to the sampled
    token's, to the last bit. (Batches of other shapes round differently inside the model.)"""
    prompts = [list(f"{a}+{b}=".encode()) for a in (1, 12, 77) for b in (3, 40, 55, 8)]
    params = {"temperature": 1.0, "max_new_tokens": 32, "ignore_eos": True, "sampling_seed": 1}
    pool = make_pool("qwen3", 1, dtype="bfloat16", warmup="none")
    results = pool.generate_all(input_ids=prompts, sampling_params=params, return_logprob=True)
    scores = pool.score(
        input_ids=prompts, continuation_ids=[result["output_ids"] for result in results]
    )
    sampled = [value for one in results for value, *_ in one["meta_info"]["output_token_logprobs"]]
    scored = [value for one in scores for value in one["logprobs"]]
    assert np.mean(np.float32(sampled) == np.float32(scored)) > 0.9
