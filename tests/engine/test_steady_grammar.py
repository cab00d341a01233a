"""Grammars and named ids in steady decode, which needs no step of upstream's own for them."""

import re
from typing import Any

import pytest

from enginepool import EnginePool
from enginepool.engine.steady.pace import Pace
from tests.support.liveness import SECONDS, at_rest, callers, until
from tests.support.marks import slow, steady_decode
from tests.support.pools import MakePool, compilations, same
from tests.support.steady import (
    GREEDY,
    PROMPTS,
    ask,
    ask_without_flush,
    of_any_kind,
    penalised,
    same_top,
    steps,
    upstreams_own,
)

pytestmark = steady_decode

REGEXES = ["([a-f]{3}-){5}", "(ab|cd|e[0-9])+", "[a-z]{1,20}x?"]


def with_grammars(params: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every other request has a grammar besides its other parameters."""
    free = {"stop": [], "stop_token_ids": [], "ignore_eos": False, "max_new_tokens": 50}
    free["min_new_tokens"] = 0
    return [
        one | free | {"regex": REGEXES[index % 3]} if index % 2 else one
        for index, one in enumerate(params)
    ]


def named_values(results: list[dict[str, Any]]) -> list[list[float]]:
    """The log-probabilities of the ids that each request names, by position."""
    return [
        [entry[0] for place in result["meta_info"]["output_token_ids_logprobs"] for entry in place]
        for result in results
    ]


@pytest.mark.parametrize("seed", [4, *slow(9, 14)])
def test_as_upstreams_own_steps(kind: EnginePool, seed: int) -> None:
    """A batch with and without grammars, penalties, named ids and the most probable ids."""
    params = with_grammars(penalised(len(PROMPTS), seed=seed))
    options = {"top_logprobs_num": 5, "token_ids_logprob": [97, 98, 45, 7, 97]}
    with upstreams_own(kind):
        expected = ask(kind, params, **options)
    before = steps(kind)
    results = ask(kind, params, **options)
    steady, fallback = (now - then for now, then in zip(steps(kind), before, strict=True))
    same(results, expected)
    same_top(results, expected)
    for got, wanted in zip(named_values(results), named_values(expected), strict=True):
        assert got == pytest.approx(wanted, abs=1e-4)
    assert steady > fallback == 0
    for one, result in zip(params, results, strict=True):
        if "regex" in one and result["meta_info"]["finish_reason"]["type"] == "stop":
            assert re.fullmatch(one["regex"], result["text"])
    kind.flush_cache()
    assert at_rest(kind)


def test_the_pace_ignores_steps_with_a_grammar(
    kind: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device then waits for masks. So launches would get several steps, also later ones."""
    counted, launched = list[bool](), Pace.launched

    def counting(self: Pace, *, idle: bool) -> None:
        counted.append(idle)
        launched(self, idle=idle)

    monkeypatch.setattr(Pace, "launched", counting)
    before = steps(kind)[0]
    params = GREEDY | {"regex": "[a-z]{20}", "ignore_eos": False, "max_new_tokens": 20}
    ask(kind, params, PROMPTS[:2])
    assert steps(kind)[0] > before + 15
    assert not counted


def test_grammars_join_and_leave(kind: EnginePool, joined: list[int]) -> None:
    """Requests with a grammar or named ids join a batch that has several steps in flight, and
    leave it. The other requests are as without them."""
    prompts = [[7 + i, *range(3, 3 + 11 * (i % 4))] for i in range(48)]
    params = with_grammars(of_any_kind(len(prompts), seed=2))
    alone = [
        ask(kind, params[half::2], prompts[half::2], **options)
        for half, options in ((0, {}), (1, {"token_ids_logprob": [97, 5]}))
    ]
    joined.clear()
    before = steps(kind)
    kind.flush_cache()
    with compilations() as compiled, callers(2) as executor:
        calls = [
            executor.submit(ask_without_flush, kind, params[half::2], prompts[half::2], **options)
            for half, options in ((0, {}), (1, {"token_ids_logprob": [97, 5]}))
        ]
        free, constrained = (call.result(SECONDS) for call in calls)
    assert not compiled
    assert joined
    same(free, alone[0])
    same(constrained, alone[1])
    for got, wanted in zip(named_values(constrained), named_values(alone[1]), strict=True):
        assert got == pytest.approx(wanted, abs=1e-4)
    assert steps(kind)[1] == before[1]


def test_no_step_is_upstreams_own_under_load(
    make_pool: MakePool, options: dict[str, Any], retracted: list[int]
) -> None:
    """More outputs than fit the KV cache, long prompts that are prefilled and scored in pieces,
    an aborted request. No step is upstream's own, because the warm-up does not compile those."""
    daring = {"schedule_conservativeness": 0.3}
    pool = make_pool("qwen3", 1, **options | {"precompile_bs_paddings": [8]} | daring)
    params = {"temperature": 0.0, "max_new_tokens": 200, "frequency_penalty": 0.2}
    long = [[3 + i, *range(30, 200)] for i in range(6)]
    pieces: Any = {"input_ids": long, "sampling_params": GREEDY | {"max_new_tokens": 30}}
    pieces |= {"return_logprob": True, "return_prompt_logprob": True}
    expected = [ask(pool, params, [prompt])[0] for prompt in PROMPTS[:8]]
    expected_pieces = pool.generate_all(**pieces)
    before = steps(pool)
    pool.flush_cache()
    assert not retracted
    with compilations() as compiled, callers(2) as executor:
        outputs = executor.submit(ask_without_flush, pool, params, PROMPTS[:8])
        until(lambda: sum(retracted) > 0)  # later, because the other requests would leave less room
        scored = executor.submit(pool.generate_all, **pieces)
        for number, chunk in enumerate(pool.stream(None, params, input_ids=PROMPTS[15])):
            if number == 1:
                pool.abort_request(chunk["meta_info"]["id"])
        same(outputs.result(SECONDS), expected)
        same(scored.result(SECONDS), expected_pieces)
    assert chunk["meta_info"]["finish_reason"]["type"] == "abort"
    assert not compiled
    assert steps(pool)[1] == before[1]
