"""The ids that output tokens were sampled from follow NumPy's law on the plain JAX reference's
logits."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from enginepool import EnginePool
from tests.pool.test_bad_input import refused
from tests.support import faults
from tests.support.liveness import SECONDS, callers, until
from tests.support.marks import steady_decode
from tests.support.masks import NAMES, SLACK, assert_masks, cut, left, rows_of
from tests.support.pools import MakePool, compilations, same
from tests.support.scores import ids
from tests.support.steady import several_at_once, upstreams_own

PROMPTS = [ids(length, length) for length in (3, 90, 40, 7, 70, 11)]
NARROW = {
    "temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "max_new_tokens": 40,
    "ignore_eos": True, "sampling_seed": 5,
}  # fmt: skip


@pytest.fixture
def model(model_dir: Callable[[str], Path]) -> Path:
    return model_dir("qwen3")


def mixed(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Parameters with and without seed and penalties, greedy and sampled."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        one: dict[str, Any] = {
            "max_new_tokens": draw.randint(20, 70),
            "temperature": draw.choice([0.0, 0.7, 1.0, 1.3]),
            "top_k": draw.choice([-1, 1, 5, 40, 300]),
            "top_p": draw.choice([1.0, 0.95, 0.5]),
            "min_p": draw.choice([0.0, 0.0, 0.05]),
            "ignore_eos": draw.random() < 0.5,
        }
        if draw.random() < 0.5:
            one["sampling_seed"] = draw.randrange(1000)
        if draw.random() < 0.4:
            one |= {"frequency_penalty": draw.uniform(-1, 1), "presence_penalty": 0.5}
        if draw.random() < 0.4:
            one["min_new_tokens"] = draw.randint(1, 15)
        made.append(one)
    return made


def ends(pool: EnginePool) -> Callable[..., Sequence[int]]:
    """The ids that may not come before `min_new_tokens`."""
    end = pool.engines[0].tokenizer_manager.tokenizer.eos_token_id

    def banned(output: Any, given: dict[str, Any], place: int) -> Sequence[int]:
        del output
        return [end] if place < given.get("min_new_tokens", 0) else []

    return banned


def with_laws(one: dict[str, Any]) -> dict[str, Any]:
    """At temperature 0 and with `top_k` of 1 only the most probable id is left."""
    return one | {"temperature": 0.0} if one.get("top_k") == 1 and one["temperature"] == 1 else one


@pytest.mark.parametrize("devices", [1, 4])
def test_of_mixed_parameters(make_pool: MakePool, model: Path, devices: int) -> None:
    """A thousand positions. Other requests in the same batches want none. Nothing is compiled."""
    pool = make_pool("qwen3", devices)
    given = [with_laws(one) for one in mixed(60, seed=devices)]
    prompts = [PROMPTS[index % 6] for index in range(60)]
    options: Any = {"input_ids": prompts[:12], "sampling_params": given[:12]}
    with compilations() as seen, callers(1) as executor, several_at_once():
        others = executor.submit(pool.generate_all, **options)
        results = pool.generate_all(
            input_ids=prompts, sampling_params=given, return_sampling_mask=True
        )
        assert not any(name in one["meta_info"] for one in others.result(SECONDS) for name in NAMES)
    assert seen == []
    assert assert_masks(model, prompts, given, results, ends(pool)) > 1000
    assert not any("output_token_logprobs" in one["meta_info"] for one in results)


def test_the_same_tokens(pool: EnginePool) -> None:
    """Outputs are the same with and without masks."""
    options: Any = {"input_ids": PROMPTS, "sampling_params": NARROW, "return_logprob": True}
    same(pool.generate_all(**options, return_sampling_mask=True), pool.generate_all(**options))


@steady_decode
def test_of_upstreams_own_steps(make_pool: MakePool, model: Path) -> None:
    pool = make_pool("qwen3", 1)
    given = mixed(12, seed=9)
    prompts = [PROMPTS[index % 6] for index in range(12)]
    given = [with_laws(one) for one in given]
    with upstreams_own(pool):
        results = pool.generate_all(
            input_ids=prompts, sampling_params=given, return_sampling_mask=True
        )
    assert assert_masks(model, prompts, given, results, ends(pool)) > 300


def test_under_a_grammar(pool: EnginePool, model: Path) -> None:
    """A grammar of six letters beside every other parameter. Alone it leaves the six letters."""
    six = {"max_new_tokens": 20, "min_new_tokens": 0, "ignore_eos": False, "regex": "[a-f]{20,}"}
    given = [with_laws(one) | six for one in mixed(24, seed=7)] + [{"temperature": 1.0} | six]
    prompts = [PROMPTS[index % 6] for index in range(25)]
    results = pool.generate_all(input_ids=prompts, sampling_params=given, return_sampling_mask=True)
    others = [one for one in range(272) if one not in {*b"abcdef"}]
    assert assert_masks(model, prompts, given, results, lambda *_: others) > 400
    assert rows_of(results[-1]["meta_info"]) == [[*b"abcdef"]] * 20


ONE_LEFT: list[dict[str, Any]] = [
    {"top_k": 1, "temperature": 0.7},
    {"top_p": 1e-3},
    {"top_p": 1e-46},  # 0 in float32
    {"min_p": 1.0},
    {"temperature": 1e-9},
    {"regex": "(ab){10}"},
]


def test_one_id_is_left(pool: EnginePool) -> None:
    """Its probability is 1. It is the most probable id that the grammar allows."""
    common = {"temperature": 1.0, "max_new_tokens": 30}
    given = [common | one | {"n": 2} for one in ONE_LEFT]
    results = pool.generate_all(input_ids=PROMPTS, sampling_params=given, return_sampling_mask=True)
    greedy = pool.generate_all(
        input_ids=PROMPTS, sampling_params=common | {"temperature": 0.0}, return_logprob=True
    )
    for result in results:
        meta, index = result["meta_info"], result["meta_info"]["prompt_index"]
        assert rows_of(meta) == [[token] for token in result["output_ids"]], ONE_LEFT[index]
        assert meta[NAMES[1]] == [0.0] * len(result["output_ids"])
        if "regex" in ONE_LEFT[index]:
            assert result["text"] == "ab" * 10
        else:
            assert result["output_ids"] == greedy[index]["output_ids"], ONE_LEFT[index]


def test_in_bfloat16(make_pool: MakePool) -> None:
    """Many logits are equal. Ids that tie with the last kept one are kept, too."""
    pool = make_pool("qwen3", 1, dtype="bfloat16", warmup="none")
    given = NARROW | {"top_k": 8, "top_p": 1.0, "min_p": 0.0}
    results = pool.generate_all(
        input_ids=PROMPTS, sampling_params=given, return_sampling_mask=True, top_logprobs_num=20
    )
    longest = 0
    for result in results:
        meta = result["meta_info"]
        each = zip(result["output_ids"], meta["output_top_logprobs"], meta[NAMES[1]], strict=True)
        for row, (token, top, value) in zip(rows_of(meta), each, strict=True):
            law = np.full(272, -np.inf)
            law[[one for _, one, _ in top]] = [logprob for logprob, *_ in top]
            mask = np.isin(np.arange(272), row)
            assert mask[left(law, given, SLACK)].all()
            assert left(law, given, -SLACK)[mask].all()
            assert value == pytest.approx(law[token] - np.logaddexp.reduce(law[mask]), abs=SLACK)
            longest = max(longest, len(row))
    assert longest > 8


def test_whole_vocabulary(pool: EnginePool) -> None:
    """Without a filter there is no list, and the values are the token's own."""
    result = pool.generate(
        input_ids=PROMPTS[0], sampling_params={"temperature": 1.0, "max_new_tokens": 5},
        return_logprob=True, return_sampling_mask=True,
    )  # fmt: skip
    meta = result["meta_info"]
    count = len(result["output_ids"])
    assert meta[NAMES[0]] == {"indptr": [0] * (count + 1), "ids": [], "too_many": []}
    own = [value for value, *_ in meta["output_token_logprobs"]]
    assert meta[NAMES[1]] == pytest.approx(own, abs=1e-5)


def test_too_many(make_pool: MakePool, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the ids do not fit, the mask has only their number. The values are still computed with
    all of them."""
    for module in ("steady.sample", "top_logprobs"):
        monkeypatch.setattr(f"enginepool.engine.{module}.MAX_KEPT_IDS", 8)
    pool = make_pool("qwen3", 1, random_seed=77)  # a pool of its own
    params = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": 6}
    given = [params | {"top_k": top_k} for top_k in (8, 9, 30, -1)]
    results = pool.generate_all(
        input_ids=PROMPTS[:4], sampling_params=given, return_sampling_mask=True
    )
    masks = [result["meta_info"][NAMES[0]] for result in results]
    assert [len(mask["ids"]) for mask in masks] == [48, 0, 0, 0]
    counts = [[count for _, count in mask["too_many"]] for mask in masks]
    assert counts == [[], [9] * 6, [30] * 6, []]
    assert [place for place, _ in masks[1]["too_many"]] == list(range(6))
    part = {"output_ids": results[1]["output_ids"][:3], "meta_info": cut(results[1], 3)}
    more = pool.generate_all(
        input_ids=PROMPTS[1:2], sampling_params=given[1], return_sampling_mask=True,
        partial_outputs=[part],
    )  # fmt: skip
    assert [count for _, count in more[0]["meta_info"][NAMES[0]]["too_many"]] == [9] * 6


# With what else happens to an output


def test_over_a_retract(make_pool: MakePool, model: Path) -> None:
    pool = make_pool("qwen3", 1)
    params = NARROW | {"max_new_tokens": 60}
    options: Any = {"input_ids": PROMPTS[:3], "sampling_params": params}
    channel = pool.runtime.workers[0].channel
    let_go = faults.hang_in_step(pool, 0, at=10)
    with callers(2) as executor:
        answer = executor.submit(pool.generate_all, **options, return_sampling_mask=True)
        assert let_go.begun.wait(SECONDS)
        pause = executor.submit(pool.pause_generation, "retract")
        until(channel.has_jobs)
        let_go.set()
        pause.result(SECONDS)
        pool.continue_generation()
        results = answer.result(SECONDS)
    assert assert_masks(model, PROMPTS[:3], [params] * 3, results, ends(pool)) > 100


def test_outputs_that_are_retracted(make_pool: MakePool, model: Path, retracted: list[int]) -> None:
    """For lack of KV cache. They resume later."""
    pool = make_pool("qwen3", 1)
    prompts = [[100 + n, 9] for n in range(6)]
    params = {"temperature": 1.0, "top_k": 4, "max_new_tokens": 300, "min_new_tokens": 300}
    results = pool.generate_all(
        input_ids=prompts, sampling_params=params, return_sampling_mask=True
    )
    assert sum(retracted) > 0
    assert_masks(model, prompts, [params] * 6, results, ends(pool))


def test_an_output_that_goes_on(pool: EnginePool) -> None:
    """It resumes from a part, which must have masks."""
    options: Any = {
        "input_ids": PROMPTS[:2], "sampling_params": NARROW, "return_sampling_mask": True,
    }  # fmt: skip
    whole = pool.generate_all(**options)
    parts = [
        {"output_ids": result["output_ids"][:7], "meta_info": cut(result, 7)} for result in whole
    ]
    results = pool.generate_all(**options, partial_outputs=parts)
    for result, expected in zip(results, whole, strict=True):
        assert result["output_ids"] == expected["output_ids"]
        assert result["meta_info"][NAMES[0]] == expected["meta_info"][NAMES[0]]
        values = expected["meta_info"][NAMES[1]]
        assert result["meta_info"][NAMES[1]] == pytest.approx(values, abs=1e-4)
    call = lambda: pool.generate_all(**options, partial_outputs=parts)  # noqa: E731
    for spoil in (
        lambda meta: meta.pop(NAMES[1]),
        lambda meta: meta[NAMES[0]]["ids"].pop(),
        lambda meta: meta[NAMES[0]]["indptr"].pop(),
        lambda meta: meta.update({NAMES[0]: None}),
    ):
        parts[1]["meta_info"] = cut(whole[1], 7)
        spoil(parts[1]["meta_info"])
        refused(pool, call, NAMES[0], "7 output_ids", "return_sampling_mask=True", prompt=1)


def test_stream(pool: EnginePool) -> None:
    """Each chunk has the masks of its ids."""

    async def ask() -> list[dict[str, Any]]:
        stream = pool.async_stream(
            input_ids=PROMPTS, sampling_params=NARROW, return_sampling_mask=True
        )
        return [chunk async for chunk in stream]

    chunks = anyio.run(ask)
    last = {chunk["index"]: chunk for chunk in chunks}
    for chunk in chunks:
        count = len(chunk["output_ids"])
        kept = {name: chunk["meta_info"][name] for name in NAMES}
        assert kept == cut(last[chunk["index"]], count)
    assert all(len(rows_of(chunk["meta_info"])) == 40 for chunk in last.values())


@pytest.mark.slow
def test_one_engine_on_two_devices(make_pool: MakePool, model_dir: Callable[[str], Path]) -> None:
    """The vocabulary is sharded over both."""
    pool = make_pool("llama", 1, tp_size=2)
    given = [with_laws(one) for one in mixed(8, seed=3)]
    prompts = [PROMPTS[index % 6] for index in range(8)]
    with compilations() as seen:
        results = pool.generate_all(
            input_ids=prompts, sampling_params=given, return_sampling_mask=True
        )
    assert seen == []
    assert assert_masks(model_dir("llama"), prompts, given, results, ends(pool)) > 100


def test_bad_input(pool: EnginePool) -> None:
    call = lambda: pool.generate_all(input_ids=PROMPTS, return_sampling_mask="yes")  # noqa: E731
    refused(pool, call, "return_sampling_mask", "'yes'", prompt=None)
