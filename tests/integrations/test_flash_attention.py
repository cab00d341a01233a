"""The TPU's attention kernel under one engine, on pages of 16 and of 128 tokens: every id is the
plain reference's, with its log-probability, whatever the batches were."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginepool import EnginePool
from tests.integrations.conftest import OpenFlash
from tests.support.forced import assert_greedy
from tests.support.liveness import SECONDS, at_rest, callers, paused, running, until
from tests.support.pools import compilations

GREEDY = {"temperature": 0, "ignore_eos": True}
# A step takes one page at least, and a prompt past it takes several steps.
CHUNKS = {16: 64, 128: 128}


def ids(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(256), k=length)


@pytest.fixture(scope="module", params=CHUNKS)
def page(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def chunk(page: int) -> int:
    return CHUNKS[page]


@pytest.fixture(scope="module")
def pool(open_flash: OpenFlash, models: list[Path], page: int, chunk: int) -> Iterator[EnginePool]:
    """One engine on random weights."""
    steps = {"max_prefill_tokens": chunk, "chunked_prefill_size": chunk}
    with open_flash(models[0], page_size=page, precompile_token_paddings=[chunk], **steps) as one:
        yield one


@pytest.fixture(autouse=True)
def starts_empty(pool: EnginePool) -> Iterator[None]:
    """No test finds what another left in the prefix cache, or leaves something running."""
    pool.flush_cache()
    yield
    until(lambda: at_rest(pool))
    assert pool.events() == []


def ask(pool: EnginePool, prompts: list[list[int]], *lengths: int) -> list[dict[str, Any]]:
    each = [GREEDY | {"max_new_tokens": length} for length in lengths]
    return pool.generate_all(
        None, each[0] if len(each) == 1 else each, input_ids=prompts, return_logprob=True
    )


def test_prompts_around_a_page(pool: EnginePool, models: list[Path], page: int):
    """Prompts that end before, at and after the end of a page, more of them than fit a batch, and
    outputs that go over one. Warm-up has compiled all programs."""
    prompts = [ids(n) for n in (1, 2, page - 1, page, page + 1, 3, page - 2, 2 * page)]
    with compilations() as compiled:
        results = ask(pool, prompts, 6)
    assert not compiled
    assert assert_greedy(models[0], prompts, results) > 40


def test_prefill_beside_decode(pool: EnginePool, models: list[Path]):
    """Prompts that come while another is being answered are prefilled between its tokens, and
    answered in its batch."""
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
    assert assert_greedy(models[0], prompts, results) > 40


def test_a_prompt_of_several_chunks(pool: EnginePool, models: list[Path], page: int, chunk: int):
    """It is prefilled step by step, and others go with it."""
    steps = pool._runtime().workers[0].channel.steps
    prompts = [ids(2 * chunk + 7), ids(2 * chunk, 1), ids(6)]
    results = ask(pool, prompts, 3)
    assert pool._runtime().workers[0].channel.steps - steps >= 4 + 2
    assert assert_greedy(models[0], prompts, results) == 9


def test_prefixes_are_found_again(pool: EnginePool, models: list[Path], page: int):
    """Whole pages of an earlier prompt are not prefilled again, and what follows is right."""
    shared = ids(page + 5)
    prompts = [shared, [*shared, *ids(9)], [*shared[:page], *ids(3)], shared[: page - 1]]
    results = [ask(pool, [prompt], 4)[0] for prompt in prompts]
    cached = [result["meta_info"]["cached_tokens"] for result in results]
    assert cached == [0, page, page, 0]
    assert assert_greedy(models[0], prompts, results) == 16
