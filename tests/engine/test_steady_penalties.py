"""Penalties, `min_new_tokens` and the most probable ids in steady decode."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from enginepool import EnginePool
from enginepool.engine.steady.device_batch import Features
from tests.support import faults
from tests.support.liveness import SECONDS, at_rest, callers, paused, until
from tests.support.marks import slow, steady_decode
from tests.support.pools import MakePool, compilations, same
from tests.support.steady import (
    LONG,
    PROMPTS,
    ask,
    ask_without_flush,
    decoding,
    penalised,
    same_top,
    steps,
    upstreams_own,
)

pytestmark = steady_decode


@pytest.mark.parametrize(("seed", "top"), [(6, 20), *slow((6, 0), (7, 0), (7, 20))])
def test_penalties_as_upstreams_own_steps(kind: EnginePool, seed: int, top: int) -> None:
    """Beside requests without penalties, with and without the most probable ids.
    (`test_penalised_logprobs.py` compares with the law.)"""
    params = penalised(len(PROMPTS), seed=seed)
    with upstreams_own(kind):
        expected = ask(kind, params, top_logprobs_num=top)
    before = steps(kind)
    results = ask(kind, params, top_logprobs_num=top)
    steady, fallback = (now - then for now, then in zip(steps(kind), before, strict=True))
    same(results, expected)
    if top:
        same_top(results, expected)
    assert steady > fallback == 0
    plain = [{k: v for k, v in one.items() if "penalty" not in k} for one in params]
    assert [r["output_ids"] for r in ask(kind, plain)] != [r["output_ids"] for r in results]
    kind.flush_cache()
    assert at_rest(kind)


def test_some_want_the_most_probable_ids(kind: EnginePool) -> None:
    """The other requests of the batch get none."""
    half = len(PROMPTS) // 2
    prompts = PROMPTS[:half], PROMPTS[half:]
    params = [penalised(half, seed=seed) for seed in (8, 13)]
    expected = [ask(kind, *both, top_logprobs_num=5) for both in zip(params, prompts, strict=True)]
    kind.flush_cache()
    with callers(2) as executor:
        calls = [
            executor.submit(ask_without_flush, kind, *both, top_logprobs_num=top)
            for *both, top in zip(params, prompts, (0, 5), strict=True)
        ]
        without, with_top = (call.result(SECONDS) for call in calls)
    same(without + with_top, expected[0] + expected[1])
    same_top(with_top, expected[1])
    assert not any("output_top_logprobs" in result["meta_info"] for result in without)


def test_penalised_requests_join(kind: EnginePool, joined: list[int]) -> None:
    """They get rows of earlier requests, whose outputs do not count for them."""
    prompts = [[7 + i, *range(3, 3 + 11 * (i % 4))] for i in range(48)]
    params = penalised(len(prompts), seed=10)
    with upstreams_own(kind):
        expected = ask(kind, params, prompts)
    assert not joined
    before = steps(kind)
    with compilations() as compiled:
        same(ask(kind, params, prompts, top_logprobs_num=2), expected)
    assert not compiled
    assert joined
    steady, fallback = (now - then for now, then in zip(steps(kind), before, strict=True))
    assert steady > fallback == 0


def test_upstream_goes_on_where_steady_decode_has_stopped(steady_pool: EnginePool) -> None:
    """Upstream's penalties are up to date then. Steady decode continues where upstream stopped."""
    always = {"max_new_tokens": 200, "ignore_eos": True, "stop": [], "stop_token_ids": []}
    params = [one | always for one in penalised(8, seed=11)]
    params[0] |= {"min_new_tokens": 190, "ignore_eos": False, "stop_token_ids": [*range(20, 90)]}
    prompts = PROMPTS[:8]
    with upstreams_own(steady_pool):
        expected = ask(steady_pool, params, prompts)
    before = steps(steady_pool)
    steady_pool.flush_cache()
    with callers() as executor, ExitStack() as stack:
        call = executor.submit(ask_without_flush, steady_pool, params, prompts)
        for _ in range(2):
            decoding(steady_pool, 8)
            with paused(steady_pool):
                stack.enter_context(upstreams_own(steady_pool))
            decoding(steady_pool, 8)
            with paused(steady_pool):
                stack.close()
        same(call.result(SECONDS), expected)
    assert all(now > then + 8 for now, then in zip(steps(steady_pool), before, strict=True))


def test_penalties_need_no_step_of_upstreams_own(
    steady_pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device computes penalties only while a request with penalties runs."""
    most = steady_pool.config.max_decode_steps
    program, looked_at = faults.scheduler_of(steady_pool, 0).steady.program, list[bool]()
    step = program.step

    def looking(state: Any, batch: Any, at_once: int, **new: Any) -> Any:
        features = Features(*np.asarray(batch.numbers)[: len(Features._fields)])
        looked_at.extend([bool(features.penalised)] * at_once)
        return step(state, batch, at_once, **new)

    monkeypatch.setattr(program, "step", looking)
    before = steps(steady_pool)
    penalties = {"frequency_penalty": 0.4, "min_new_tokens": 3}
    params = [LONG | {"max_new_tokens": 40}, LONG | {"max_new_tokens": 8} | penalties]
    steady_pool.engines[0].generate(
        None, params, input_ids=PROMPTS[:2], return_logprob=True, top_logprobs_num=2
    )
    assert steps(steady_pool)[1] == before[1]
    # Steps that were launched ahead still have them, until the host has read the request's end.
    assert 7 <= sum(looked_at) <= 7 + 3 * most
    assert len(looked_at) >= 39


@pytest.mark.parametrize(
    ("fault", "at"),
    [
        (faults.raise_after_step, 9),
        *slow((faults.raise_in_step, 3), (faults.raise_after_bookkeeping, 4)),
    ],
)
def test_a_failed_step_loses_no_count(
    make_pool: MakePool, options: dict[str, Any], fault: Callable[..., None], at: int
) -> None:
    """A request that continues on another engine counts the tokens that were read before, and
    has the most probable ids of every token once."""
    pool = make_pool("qwen3", 2, **options)
    always = {"max_new_tokens": 90, "ignore_eos": True, "stop": [], "stop_token_ids": []}
    params = [one | always for one in penalised(8, seed=14)]
    params[3] |= {"min_new_tokens": 80, "ignore_eos": False, "stop_token_ids": [*range(20, 90)]}
    expected = ask(pool, params, PROMPTS[:8], top_logprobs_num=3)
    before = len(pool.events())
    pool.flush_cache()
    fault(pool, 1, at)
    results = ask_without_flush(pool, params, PROMPTS[:8], top_logprobs_num=3)
    until(lambda: len(pool.events()) == before + 2)
    same(results, expected)
    same_top(results, expected)


@pytest.mark.parametrize("at", [1, 9])
def test_a_step_that_fails_between_two_requests(steady_pool: EnginePool, at: int) -> None:
    """In a prefill or in a decode step the text of one request cannot be computed. Requests before
    it in the batch have their ids then, but not yet the other values. In the end each token has
    all values, once."""
    always = LONG | {"max_new_tokens": 40}
    params = [always | ({"stop": ["no such text"]} if i % 4 == 3 else {}) for i in range(8)]
    options: Any = {"top_logprobs_num": 3, "token_ids_logprob": [97, 5]}
    options["return_sampling_mask"] = True
    expected = ask(steady_pool, params, PROMPTS[:8], **options)
    before = len(steady_pool.events())
    steady_pool.flush_cache()
    faults.raise_in_check(steady_pool, 1, at)
    results = ask_without_flush(steady_pool, params, PROMPTS[:8], **options)
    until(lambda: len(steady_pool.events()) == before + 2)
    same(results, expected)
    same_top(results, expected)
    for result in results:
        for name in ("output_token_ids_logprobs", "output_token_sampling_logprobs"):
            assert len(result["meta_info"][name]) == 40, name
