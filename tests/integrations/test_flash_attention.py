"""The TPU's attention kernel under one engine, with pages of 16 and of 128 tokens. Every id and
its log-probability are those of the plain reference, whatever the batches were."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool import EnginePool
from tests.integrations.conftest import GREEDY, OpenFlash, ids, under_way
from tests.support.forced import LOGPROB_TOLERANCE, assert_greedy, logprobs, output_logits
from tests.support.liveness import SECONDS, at_rest, callers, paused, running, until
from tests.support.marks import slow
from tests.support.pools import SMALL, compilations, same
from tests.support.reference import make_random_model
from tests.support.steady import joins, steps

# A prefill step computes at least a page. A longer prompt takes several steps.
CHUNKS = {16: 64, 128: 128}


# Parameters that sample or change an output, each by a patch or a program of the pool's own.
DRAWN: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3, "n": 2},
    {"temperature": 1.5, "top_p": 0.6},
    {"temperature": 2.0, "min_p": 0.3},
    {"temperature": 1.0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 0, "frequency_penalty": 1.5},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two queries share a key, as in common models."""
    directory = tmp_path_factory.mktemp("flash")
    return make_random_model(directory, "qwen3", seed=1, num_layers=2, num_heads=4)


@pytest.fixture(scope="module", params=[128, *slow(16)])
def page(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def chunk(page: int) -> int:
    return CHUNKS[page]


@pytest.fixture(scope="module")
def pool(open_flash: OpenFlash, model: Path, page: int, chunk: int) -> Iterator[EnginePool]:
    """One engine on random weights."""
    steps = {"max_prefill_tokens": chunk, "chunked_prefill_size": chunk}
    with open_flash(model, page_size=page, precompile_token_paddings=[chunk], **steps) as one:
        yield one


@pytest.fixture(scope="module")
def native(model: Path) -> Iterator[EnginePool]:
    """The same model on the CPU's native attention."""
    with EnginePool(str(model), devices=1, warmup="none", **SMALL) as one:
        yield one


@pytest.fixture(autouse=True)
def starts_empty(pool: EnginePool) -> Iterator[None]:
    """The prefix cache is empty before each test, and nothing runs after it."""
    pool.flush_cache()
    yield
    until(lambda: at_rest(pool))
    assert pool.events() == []


def ask(pool: EnginePool, prompts: list[list[int]], *lengths: int) -> list[dict[str, Any]]:
    each = [GREEDY | {"max_new_tokens": length} for length in lengths]
    return pool.generate_all(
        None, each[0] if len(each) == 1 else each, input_ids=prompts, return_logprob=True
    )


def test_prompts_around_a_page(pool: EnginePool, model: Path, page: int):
    """Prompts end before, at and after the end of a page, there are more than fit a batch, and
    outputs cross a page. Warm-up has compiled all programs."""
    prompts = [ids(n) for n in (1, 2, page - 1, page, page + 1, 3, page - 2, 2 * page)]
    steady, fallback = steps(pool)
    with compilations() as compiled:
        results = ask(pool, prompts, 6)
    assert not compiled
    assert steps(pool)[0] >= steady + 5
    assert steps(pool)[1] == fallback
    assert assert_greedy(model, prompts, results) > 40


def test_requests_join_and_leave(pool: EnginePool, model: Path, page: int):
    """Rows of a batch that stays on its device end one by one. Other requests are prefilled and
    take these rows."""
    lengths = [9, 4, 14, 6, 8, 3, 11, 5]
    prompts = [ids(n, 2) for n in (page - 3, 5, page + 1, 2, page - 1, 7, page, 1)]
    with joins() as joined:
        results = ask(pool, prompts, *lengths)
    assert sum(joined) > 2
    assert assert_greedy(model, prompts, results) > 50


@pytest.mark.slow
def test_stop_ids_end_a_row(pool: EnginePool, model: Path):
    """A row ends on the device, and the others continue."""
    prompts = [ids(n, 3) for n in (6, 12, 3, 20)]
    whole = ask(pool, prompts, 12)
    pool.flush_cache()
    stop = whole[1]["output_ids"][4]
    params = [GREEDY | {"max_new_tokens": 12} for _ in prompts]
    params[1] |= {"ignore_eos": False, "stop_token_ids": [stop]}
    steady = steps(pool)[0]
    results = pool.generate_all(None, params, input_ids=prompts, return_logprob=True)
    assert steps(pool)[0] >= steady + 11
    assert results[1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    outputs = whole[1]["output_ids"]
    assert results[1]["output_ids"] == outputs[: outputs.index(stop) + 1]
    assert assert_greedy(model, prompts, results) > 30


def test_prefill_beside_decode(pool: EnginePool, model: Path):
    """Prompts that come while another request decodes are prefilled between its tokens and join
    its batch."""
    prompts = [ids(9), ids(40), ids(5), ids(17)]
    with callers(2) as executor:
        first = executor.submit(ask, pool, prompts[:1], 30)
        until(lambda: running(pool) == 1)
        with paused(pool):
            rest = executor.submit(ask, pool, prompts[1:], 4, 7, 5)
            until(lambda: pool.stats()["waiting"] == 3)
            assert not first.done()
        others = rest.result(SECONDS)
        assert not first.done()
        results = [*first.result(SECONDS), *others]
    assert assert_greedy(model, prompts, results) > 40


def test_a_prompt_of_several_chunks(pool: EnginePool, model: Path, page: int, chunk: int):
    """It is prefilled step by step, together with others."""
    steps = pool.runtime.workers[0].channel.steps
    prompts = [ids(2 * chunk + 7), ids(2 * chunk, 1), ids(6)]
    results = ask(pool, prompts, 3)
    assert pool.runtime.workers[0].channel.steps - steps >= 4 + 2
    assert assert_greedy(model, prompts, results) == 9


def test_prefixes_are_found_again(pool: EnginePool, model: Path, page: int):
    """Whole pages of an earlier prompt are not prefilled again, and the output is right."""
    shared = ids(page + 5)
    prompts = [shared, [*shared, *ids(9)], [*shared[:page], *ids(3)], shared[: page - 1]]
    results = [ask(pool, [prompt], 4)[0] for prompt in prompts]
    cached = [result["meta_info"]["cached_tokens"] for result in results]
    assert cached == [0, page, page, 0]
    assert assert_greedy(model, prompts, results) == 16


def test_what_steady_steps_wrote_is_found_again(pool: EnginePool, model: Path, page: int):
    """Such a page of KV cache begins with a prompt's tokens and ends with output tokens."""
    (first,) = ask(pool, [ids(page - 4, 4)], 8)
    prompts = [ids(page - 4, 4), [*ids(page - 4, 4), *first["output_ids"], *ids(3)]]
    (second,) = ask(pool, prompts[1:], 5)
    assert second["meta_info"]["cached_tokens"] == page
    assert assert_greedy(model, prompts, [first, second]) == 13


@pytest.mark.slow
def test_samples_are_those_of_native_attention(pool: EnginePool, native: EnginePool, model: Path):
    """With seeds, every filter and penalties: the ids and their log-probabilities. Other tests
    compare those with the law."""
    prompts = [ids(5 + 6 * i) for i in range(len(DRAWN))]
    each = [{"sampling_seed": 7, "max_new_tokens": 8, "ignore_eos": True} | own for own in DRAWN]
    results, expected = (
        one.generate_all(None, each, input_ids=prompts, return_logprob=True)
        for one in (pool, native)
    )
    same(results, expected)


def test_top_logprobs(pool: EnginePool, model: Path):
    """Each step's most probable ids are those of the reference, and asking for them compiles
    nothing."""
    prompts = [ids(11), ids(70)]
    params = GREEDY | {"max_new_tokens": 5}
    with compilations() as compiled:
        results = pool.generate_all(None, params, input_ids=prompts, top_logprobs_num=4)
    assert not compiled
    logits = output_logits(model, prompts, [result["output_ids"] for result in results])
    for result, rows in zip(results, logits, strict=True):
        for entries, expected in zip(
            result["meta_info"]["output_top_logprobs"], logprobs(rows), strict=True
        ):
            values = np.array([value for value, _, _ in entries])
            assert np.abs(values - np.sort(expected)[:-5:-1]).max() < LOGPROB_TOLERANCE
            assert np.abs(values - expected[[i for _, i, _ in entries]]).max() < LOGPROB_TOLERANCE


def test_retracted_requests_resume(pool: EnginePool, model: Path, page: int):
    """They continue with their tokens, which count for penalties."""
    prompts = [ids(page - 3), ids(30), ids(4)]
    params = [
        GREEDY | {"max_new_tokens": 14, "frequency_penalty": penalty} for penalty in (0, 0, 1.5)
    ]
    expected = pool.generate_all(None, params, input_ids=prompts, return_logprob=True)
    pool.flush_cache()
    with under_way(pool, prompts, params) as results, paused(pool, "retract"):
        assert at_rest(pool)
        assert pool.stats()["waiting"] == 3
    same(results, expected)
    assert assert_greedy(model, prompts[:2], results[:2]) > 20


def test_kv_cache_is_released_and_made_again(pool: EnginePool, model: Path, page: int):
    """Running requests continue in the new cache, and nothing is compiled."""
    prompts = [ids(page + 4), ids(21)]
    with under_way(pool, prompts, GREEDY | {"max_new_tokens": 14}) as results:
        released = pool.release_memory_occupation()
        with compilations() as compiled:
            assert pool.resume_memory_occupation() == released > 0
    assert not compiled
    assert assert_greedy(model, prompts, results) > 20
