"""Results of a pool are the reference's and come in the order of the prompts."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from enginepool import EnginePool, InvalidRequest
from enginepool.toy.files import END_ID
from tests.support.forced import LOGPROB_TOLERANCE, assert_greedy, logprobs, output_logits
from tests.support.marks import slow
from tests.support.pools import MakePool

FAMILIES = ["qwen3", *slow("larger qwen3", "qwen2", "llama")]
GREEDY = {"temperature": 0, "ignore_eos": True}
TEXTS = ["你是谁", "🙂", "e\u0301 12+7="]
LENGTHS = [1, 2, 3, 17, 63, 64, 65, 100, 129, 200]


def random_ids(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def prompts_of_all_lengths() -> list[list[int]]:
    return [list(text.encode()) for text in TEXTS] + [random_ids(n, n) for n in LENGTHS]


def params(*max_new_tokens: int, **others: Any) -> list[dict[str, Any]]:
    return [GREEDY | {"max_new_tokens": number} | others for number in max_new_tokens]


def test_more_requests_may_run_than_a_prefill_has_tokens(make_pool: MakePool):
    """A batch has no more rows than a prefill has tokens. The others wait."""
    tokens: dict[str, Any] = dict.fromkeys(("max_prefill_tokens", "chunked_prefill_size"), 4)
    paddings: dict[str, Any] = {"precompile_token_paddings": [4], "precompile_bs_paddings": [4]}
    pool = make_pool("qwen3", 1, max_running_requests=6, warmup="none", **tokens, **paddings)
    prompts = [[5 + i, 7] for i in range(6)]
    results = pool.generate_all(input_ids=prompts, sampling_params=params(40)[0])
    assert [len(result["output_ids"]) for result in results] == [40] * 6
    assert pool.events() == []


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batch_on_four_engines_equals_reference(
    make_pool: MakePool, model_dir: Callable[[str], Path], family: str
):
    """Greedy ids and log-probabilities for prompts of 1 to 200 tokens and outputs of over 100.
    The KV cache of four of these does not fit an engine."""
    prompts = prompts_of_all_lengths()
    lengths = [120 if i % 3 == 0 else 55 + i for i in range(len(prompts))]
    results = make_pool(family, 4).generate_all(
        input_ids=prompts, sampling_params=params(*lengths), return_logprob=True
    )
    assert [result["meta_info"]["completion_tokens"] for result in results] == lengths
    assert {result["meta_info"]["engine_index"] for result in results} == {0, 1, 2, 3}
    assert assert_greedy(model_dir(family), prompts, results) > 0.9 * sum(lengths)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engines", [1, *slow(2)])
def test_one_and_two_engines_equal_reference(
    make_pool: MakePool, model_dir: Callable[[str], Path], family: str, engines: int
):
    """Ids do not depend on the number of engines, or on whether a pool compiles while it serves."""
    prompts = prompts_of_all_lengths()[::-3]
    results = make_pool(family, engines, warmup="none").generate_all(
        input_ids=prompts, sampling_params=params(*[53] * len(prompts)), return_logprob=True
    )
    assert assert_greedy(model_dir(family), prompts, results) > 0.9 * 53 * len(prompts)


@pytest.mark.parametrize("engines", [1, 4, *slow(2)])
def test_a_prompt_alone_equals_reference(
    make_pool: MakePool, model_dir: Callable[[str], Path], engines: int
):
    """A prompt alone gets the reference's ids, also a text whose characters have several bytes."""
    pool = make_pool("qwen3", engines, **({} if engines == 4 else {"warmup": "none"}))
    for text in TEXTS:
        result = pool.generate(text, params(60)[0], return_logprob=True)
        assert assert_greedy(model_dir("qwen3"), [list(text.encode())], [result]) > 50
    ids = random_ids(150, 9)
    result = pool.generate(None, params(60)[0], input_ids=ids, return_logprob=True)
    assert assert_greedy(model_dir("qwen3"), [ids], [result]) > 50


def test_top_logprobs_equal_reference(pool: EnginePool, model_dir: Callable[[str], Path]):
    """Each step's most probable ids, in order, beside requests that want none or other numbers
    of them."""
    prompts = [random_ids(length, length + 1) for length in (3, 90, 40, 7, 70, 11)]
    with anyio.from_thread.start_blocking_portal() as portal:
        others = portal.start_task_soon(
            lambda: pool.async_generate_all(input_ids=prompts, sampling_params=params(*[30] * 6))
        )
        results = pool.generate_all(
            input_ids=prompts, sampling_params=params(*range(20, 26)), top_logprobs_num=5
        )
        plain = others.result()
    assert "output_top_logprobs" not in plain[0]["meta_info"]
    assert "output_token_logprobs" not in plain[0]["meta_info"]
    outputs = [result["output_ids"] for result in results]
    logits = output_logits(model_dir("qwen3"), prompts, outputs)
    for result, rows in zip(results, logits, strict=True):
        expected = logprobs(rows)
        top = result["meta_info"]["output_top_logprobs"]
        assert len(top) == len(result["output_ids"])
        for step, entries in enumerate(top):
            ids = [token_id for _, token_id, _ in entries]
            values = [value for value, _, _ in entries]
            best = np.sort(expected[step])[::-1][:5]
            np.testing.assert_allclose(values, best, rtol=0, atol=1e-4)
            np.testing.assert_allclose(values, expected[step][ids], rtol=0, atol=1e-4)
            assert len(set(ids)) == 5
            assert (values[0], ids[0]) == result["meta_info"]["output_token_logprobs"][step][:2]


@pytest.mark.parametrize("width", [1, 20])
def test_top_logprobs_have_the_width_asked_for(pool: EnginePool, width: int):
    """From one entry a step up to the limit."""
    result = pool.generate("a", params(4)[0], top_logprobs_num=width)
    assert [len(entries) for entries in result["meta_info"]["output_top_logprobs"]] == [width] * 4


def test_sampled_logprobs_are_those_of_the_tempered_distribution(
    pool: EnginePool, model_dir: Callable[[str], Path]
):
    """softmax(logits / temperature), before top-k, top-p and min-p."""
    prompts = [random_ids(length, length) for length in (5, 80, 20, 33, 2, 66)]
    sampling = [
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.0},
        {"temperature": 1.5, "top_p": 0.6},
        {"temperature": 2.0, "min_p": 0.3},
        {"temperature": 0.3, "top_k": 10, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 0.0},
    ]
    each = [one | {"max_new_tokens": 25, "ignore_eos": True} for one in sampling]
    results = pool.generate_all(
        input_ids=prompts, sampling_params=each, return_logprob=True, top_logprobs_num=3
    )
    outputs = [result["output_ids"] for result in results]
    logits = output_logits(model_dir("qwen3"), prompts, outputs)
    for one, result, rows in zip(sampling, results, logits, strict=True):
        expected = logprobs(rows, one["temperature"] or 1.0)
        values = [value for value, _, _ in result["meta_info"]["output_token_logprobs"]]
        chosen = expected[np.arange(25), result["output_ids"]]
        np.testing.assert_allclose(values, chosen, rtol=0, atol=2e-4)
        top = [[v for v, _, _ in row] for row in result["meta_info"]["output_top_logprobs"]]
        best = np.sort(expected, axis=-1)[:, ::-1][:, :3]
        np.testing.assert_allclose(top, best, rtol=0, atol=2e-4)
        rank = (expected > chosen[:, None]).sum(axis=-1)
        assert rank.max() < one.get("top_k", 272)
    assert (
        sum(
            output != list(rows.argmax(axis=-1))
            for output, rows in zip(outputs, logits, strict=True)
        )
        >= 4
    )


PENALTIES = [(0.0, 0.0), (1.5, 0.0), (0.0, 2.0), (2.0, 2.0), (-1.0, 0.5), (0.7, -0.3)]


def penalised(**params: int) -> list[dict[str, Any]]:
    """Greedy sampling parameters, one for each of the penalties."""
    return [
        {"temperature": 0, "frequency_penalty": frequency, "presence_penalty": presence} | params
        for frequency, presence in PENALTIES
    ]


def assert_penalised(
    model_dir: Path, prompts: list[list[int]], each: list[dict[str, Any]], results: list[Any]
) -> int:
    """Ids, log-probabilities and the three best ids are those of the reference's logits with
    penalties. Returns how many ids differ from the greedy ones."""
    changed = 0
    logits = output_logits(model_dir, prompts, [result["output_ids"] for result in results])
    for sampling, result, rows in zip(each, results, logits, strict=True):
        frequency, presence = sampling["frequency_penalty"], sampling["presence_penalty"]
        counts = np.zeros(rows.shape[1])
        meta = result["meta_info"]
        for step, token_id in enumerate(result["output_ids"]):
            where = f"{sampling} at step {step}"
            penalised = rows[step] - frequency * counts - presence * (counts > 0)
            if step < sampling["min_new_tokens"]:
                penalised[END_ID] = -np.inf
            assert penalised[token_id] > penalised.max() - 1e-3, where
            expected = logprobs(penalised)
            chosen = meta["output_token_logprobs"][step][0]
            assert abs(chosen - expected[token_id]) < LOGPROB_TOLERANCE, where
            top = [value for value, _, _ in meta["output_top_logprobs"][step]]
            np.testing.assert_allclose(top, np.sort(expected)[:-4:-1], rtol=0, atol=1e-4)
            changed += bool(token_id != rows[step].argmax())
            counts[token_id] += 1
    return changed


def test_penalties_equal_reference(pool: EnginePool, model_dir: Callable[[str], Path]):
    """Each id that the output has costs its frequency and presence penalty. Other requests of
    the batch have other penalties, or none."""
    prompts = [random_ids(10 + i, i) for i in range(len(PENALTIES))]
    each = penalised(max_new_tokens=55, min_new_tokens=50)
    results = pool.generate_all(input_ids=prompts, sampling_params=each, top_logprobs_num=3)
    assert all(len(result["output_ids"]) >= 50 for result in results)
    assert assert_penalised(model_dir("qwen3"), prompts, each, results) > 20


def test_requests_that_ran_out_of_kv_go_on_as_if_nothing_had_happened(
    make_pool: MakePool, model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    """An engine that admitted more than its KV cache holds retracts some requests. The ids, log-
    probabilities, top-k and penalties of all stay right."""
    pool = make_pool("qwen3", 1, warmup="none", schedule_conservativeness=0.01)
    from sgl_jax.srt.managers.schedule_batch import Req

    taken_back = []
    reset = Req.reset_for_retract
    monkeypatch.setattr(
        Req, "reset_for_retract", lambda self: (taken_back.append(self.rid), reset(self))[1]
    )
    prompts = [random_ids(100, i) for i in range(6)]
    each = penalised(max_new_tokens=200, min_new_tokens=200)
    results = pool.generate_all(input_ids=prompts, sampling_params=each, top_logprobs_num=3)
    assert taken_back
    assert all(len(result["output_ids"]) == 200 for result in results)
    assert_penalised(model_dir("qwen3"), prompts, each, results)


@pytest.mark.parametrize("disturb", ["retract", "in_place", "flush"])
def test_interrupted_requests_go_on_as_if_nothing_had_happened(
    pool: EnginePool, model_dir: Callable[[str], Path], disturb: str
):
    """A pause in either mode, or a flush, during prefills and outputs changes nothing."""
    prompts = [random_ids(200 - 20 * i, i) for i in range(8)]
    each = (penalised(max_new_tokens=60, min_new_tokens=60) * 2)[: len(prompts)]
    ends: dict[int, Any] = {}
    stream = pool.stream(None, each, input_ids=prompts, top_logprobs_num=3)
    for number, chunk in enumerate(stream):
        if chunk["meta_info"]["finish_reason"] is not None:
            ends[chunk["index"]] = chunk
        if number % 40 == 5:
            if disturb == "flush":
                pool.flush_cache()
            else:
                pool.pause_generation(disturb)
                pool.continue_generation()
    results = [ends[index] for index in range(len(prompts))]
    assert all(len(result["output_ids"]) == 60 for result in results)
    assert_penalised(model_dir("qwen3"), prompts, each, results)


def test_min_new_tokens_holds_back_the_end(scripted: EnginePool, model_dir: Callable[[str], Path]):
    """Neither the end token nor a stop token comes before `min_new_tokens`. The ids are the best
    of the others, and the output includes the token that stops it."""
    prompt = list(b"wx")  # the model says y, z and its end token
    stops = [END_ID, ord("y")]
    base = {"temperature": 0, "max_new_tokens": 12}
    free, held, held_both = scripted.generate_all(
        input_ids=[prompt] * 3,
        sampling_params=[
            base,
            base | {"min_new_tokens": 6},
            base | {"min_new_tokens": 6, "stop_token_ids": stops[1:]},
        ],
    )
    assert (free["output_ids"], free["text"]) == ([*b"yz", END_ID], "yz")
    assert free["meta_info"]["finish_reason"] == {"type": "stop", "matched": END_ID}
    for result, forbidden in ((held, stops[:1]), (held_both, stops)):
        ids = result["output_ids"]
        (rows,) = output_logits(model_dir("scripted"), [prompt], [ids])
        rows = rows.copy()
        rows[:6, forbidden] = -np.inf
        assert [rows[i].max() - rows[i][token_id] < 1e-3 for i, token_id in enumerate(ids)]
        assert not set(ids[:6]) & set(forbidden)
        assert len(ids) >= 6


def test_thousand_prompts_come_back_in_their_places(
    pool: EnginePool, model_dir: Callable[[str], Path]
):
    """1,000 prompts of mixed length over four engines. Every result belongs to its prompt."""
    lengths = random.Random(3)
    prompts = [random_ids(lengths.randint(1, 30), i) for i in range(1000)]
    number = [lengths.randint(1, 3) for _ in prompts]
    results = pool.generate_all(
        input_ids=prompts, sampling_params=params(*number), return_logprob=True
    )
    meta = [result["meta_info"] for result in results]
    assert [m["prompt_index"] for m in meta] == list(range(1000))
    assert [m["prompt_tokens"] for m in meta] == [len(prompt) for prompt in prompts]
    assert [m["completion_tokens"] for m in meta] == number
    assert {m["engine_index"] for m in meta} == {0, 1, 2, 3}
    assert len({m["id"] for m in meta}) == 1000
    assert assert_greedy(model_dir("qwen3"), prompts, results) > 0.98 * sum(number)


def test_samples_of_a_prompt_are_grouped(pool: EnginePool):
    """With n > 1 the list is flat and grouped by prompt. Each sample has its prompt's and its
    own index."""
    each = [{"max_new_tokens": 2, "n": n} for n in (2, 1, 3)]
    results = pool.generate_all(["a", "bc", "def"], each)
    places = [(r["meta_info"]["prompt_index"], r["meta_info"]["sample_index"]) for r in results]
    assert places == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert [r["meta_info"]["prompt_tokens"] for r in results] == [1, 1, 2, 3, 3, 3]


def test_shape_of_what_generate_returns(pool: EnginePool):
    """A dict for a lone prompt. A list for n > 1, for a list of prompts and for no prompts."""
    one = {"max_new_tokens": 1}
    assert isinstance(pool.generate("a", one), dict)
    assert isinstance(pool.generate(None, one, input_ids=[5]), dict)
    assert len(pool.generate("a", one | {"n": 2})) == 2
    assert len(pool.generate(["a"], one)) == 1
    assert len(pool.generate(None, one, input_ids=[[5], [6, 7]])) == 2
    assert pool.generate_all([]) == pool.generate([]) == pool.generate_all(input_ids=[]) == []
    assert list(pool.as_completed([])) == list(pool.stream([])) == []


def test_numpy_ids_are_ids(pool: EnginePool):
    """Arrays of token ids are the same as lists of them."""
    sampling = params(3)[0]
    expected = pool.generate_all(input_ids=[[5, 6], [7, 8]], sampling_params=sampling)
    given = pool.generate_all(input_ids=np.array([[5, 6], [7, 8]]), sampling_params=sampling)
    assert [r["output_ids"] for r in given] == [r["output_ids"] for r in expected]
    lone = pool.generate(input_ids=np.array([5, 6]), sampling_params=sampling)
    assert lone["output_ids"] == expected[0]["output_ids"]


def test_as_completed_yields_each_result_once(pool: EnginePool):
    """In the order in which outputs end. A short one does not wait for a long one."""
    each = params(200, *[1] * 7)
    seen = list(pool.as_completed(["a"] * 8, each))
    indexes = [result["meta_info"]["prompt_index"] for result in seen]
    assert sorted(indexes) == list(range(8))
    assert indexes[-1] == 0
    expected = pool.generate_all(["a"] * 8, each)
    for result in seen:
        assert result["output_ids"] == (expected[result["meta_info"]["prompt_index"]]["output_ids"])


@pytest.mark.anyio
async def test_async_twins_equal_the_sync_calls(pool: EnginePool):
    """On asyncio and trio, several calls at once."""
    prompts, each = ["a", "bc", "你是谁"], params(5, 6, 7)
    results: dict[str, list[dict[str, Any]]] = {}

    async def collect(name: str) -> None:
        results[name] = [result async for result in pool.async_as_completed(prompts, each)]

    async with anyio.create_task_group() as group:
        group.start_soon(collect, "first")
        group.start_soon(collect, "second")
        results["all"] = await pool.async_generate_all(prompts, each)
    lone = await pool.async_generate("a", each[0])
    expected = [r["output_ids"] for r in pool.generate_all(prompts, each)]
    for name in ("first", "second", "all"):
        by_index = sorted(results[name], key=lambda r: r["meta_info"]["prompt_index"])
        assert [r["output_ids"] for r in by_index] == expected
    assert lone["output_ids"] == expected[0]


def test_chat_generates_from_the_templates_ids(scripted: EnginePool):
    """One conversation or a list. The template adds the beginning of the assistant's turn."""
    messages = [{"role": "user", "content": "12+7="}]
    template = "<|im_start|>user\n12+7=<|im_end|>\n<|im_start|>assistant\n"
    sampling = params(8)[0]
    expected = scripted.generate(template, sampling)
    result = scripted.chat(messages, sampling)
    assert result["output_ids"] == expected["output_ids"]
    assert result["meta_info"]["prompt_tokens"] == expected["meta_info"]["prompt_tokens"]
    both = scripted.chat([messages, messages], sampling)
    assert [one["output_ids"] for one in both] == [expected["output_ids"]] * 2
    without = scripted.chat(
        messages, sampling, chat_template_kwargs={"add_generation_prompt": False}
    )
    assert without["meta_info"]["prompt_tokens"] < result["meta_info"]["prompt_tokens"]


@pytest.mark.anyio
async def test_async_chat(scripted: EnginePool):
    """`chat` on asyncio and trio."""
    messages = [{"role": "user", "content": "12+7="}]
    result = await scripted.async_chat(messages, params(8)[0])
    assert result["output_ids"] == scripted.chat(messages, params(8)[0])["output_ids"]


def test_chat_without_messages_is_refused(scripted: EnginePool):
    """An empty conversation is bad input."""
    with pytest.raises(InvalidRequest, match="messages are empty"):
        scripted.chat([])


def test_generation_config_is_the_default(scripted: EnginePool, model_dir: Callable[[str], Path]):
    """Without sampling parameters the checkpoint's generation_config.json applies, here greedy
    and 16 tokens. None in a list of parameters means the same."""
    stated = json.loads((model_dir("scripted") / "generation_config.json").read_text())
    assert (stated["top_k"], stated["max_new_tokens"]) == (1, 16)
    results = scripted.generate_all(["0", "a", "8"])
    assert [result["text"] for result in results] == [
        "1234567890123456",
        "bcdefghijklmnopq",
        "9012345678901234",
    ]
    assert results[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 16}
    mixed = scripted.generate_all(["0", "0"], [None, {"temperature": 0, "max_new_tokens": 3}])
    assert [result["text"] for result in mixed] == ["1234567890123456", "123"]


@pytest.mark.parametrize("temperature", [1e-38, 2e-6, 1.0, 1e30])
def test_the_extremes_of_what_is_allowed_give_finite_numbers(
    pool: EnginePool, temperature: float
) -> None:
    """No accepted sampling parameters make an engine fail or give a log-probability that is not
    finite. With a larger temperature masked logits become NaN."""
    params = [
        {
            "temperature": temperature,
            "min_new_tokens": 4,
            "stop_token_ids": [7],
            "max_new_tokens": 4,
            "frequency_penalty": penalty,
            "presence_penalty": penalty,
            "sampling_seed": seed,
            **truncation,
        }
        for penalty, seed in ((-2.0, -(2**31)), (2.0, 2**31 - 1))
        for truncation in ({"top_k": 1}, {"top_p": 1e-30}, {"min_p": 1.0}, {})
    ]
    before = len(pool.events())
    results = pool.generate_all(input_ids=[[5, 6]] * 8, sampling_params=params, return_logprob=True)
    assert {r["meta_info"]["finish_reason"]["type"] for r in results} == {"length"}
    assert len(pool.events()) == before
