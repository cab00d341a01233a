"""A request joins steps in flight: which waits for which."""

import threading
from typing import Any

import pytest

from enginepool import EnginePool
from tests.support import faults
from tests.support.liveness import SECONDS, at_rest, callers, until, waiting
from tests.support.marks import steady_decode
from tests.support.pools import same
from tests.support.steady import GREEDY, LONG, PROMPTS

pytestmark = steady_decode

# The features of a late request. The other requests do not have them.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "sampled": ({"temperature": 1.0, "sampling_seed": 5}, {}),
    "penalties": ({"frequency_penalty": 0.9, "presence_penalty": -0.4}, {}),
    "not before": ({"min_new_tokens": 4, "ignore_eos": False}, {}),
    "strings": ({"stop": ["no such text"]}, {}),
    "many stop ids": ({"stop_token_ids": [*range(200, 220)]}, {}),
    "most probable": ({}, {"top_logprobs_num": 5}),
    "named ids": ({}, {"token_ids_logprob": [97, 5]}),
    "grammar": ({"regex": "[a-z]{30}", "ignore_eos": False}, {}),
}
_LAUNCHES = 6  # before the late request comes


class Order:
    """What the first engine does, in order, while it has a late request.

    The launch after the first few waits until `go_on` is set.

    Attributes:
        launched: The steps of every launch of decode.
        tokens: For every launch that the host has read: how many tokens the late request had then.
        prefills: For every prefill: how many launches were before it.
        first: How many launches the host had read when the late request got its first token.
    """

    def __init__(self, pool: EnginePool, late: list[int], patch: pytest.MonkeyPatch) -> None:
        self.launched: list[int] = []
        self.tokens: list[int] = []
        self.prefills: list[int] = []
        self.first = -1
        self.reached, self.go_on = threading.Event(), threading.Event()
        scheduler = faults.scheduler_of(pool, 0)
        running, steady, prefill = scheduler.running, scheduler.steady, scheduler.prefill_program
        step, append, launch = steady.program.step, steady.append, prefill.launch
        sampled_first = running.sampled_first

        def stepping(state: Any, batch: Any, steps: int, **new: Any) -> Any:
            if len(self.launched) == _LAUNCHES:
                self.reached.set()
                assert self.go_on.wait(SECONDS)
            self.launched.append(steps)
            return step(state, batch, steps, **new)

        def appending(*args: Any) -> Any:
            ended = append(*args)
            found = [one.req for one in running.held.values() if one.input_ids == late]
            self.tokens.append(len(found[0].output_ids) if found else 0)
            return ended

        def launching(*args: Any, **kwargs: Any) -> Any:
            self.prefills.append(len(self.launched))
            return launch(*args, **kwargs)

        def noting(request: Any, req: Any) -> None:
            if request.input_ids == late:
                self.first = len(self.tokens)
            sampled_first(request, req)

        patch.setattr(steady.program, "step", stepping)
        patch.setattr(steady, "append", appending)
        patch.setattr(prefill, "launch", launching)
        patch.setattr(running, "sampled_first", noting)


def generate(pool: EnginePool, prompts: list[list[int]], params: Any, **options: Any) -> list[Any]:
    engine: Any = pool.engines[0]
    return engine.generate(
        input_ids=prompts, sampling_params=params, return_logprob=True, **options
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_token_waits_for_the_prefill_alone(
    steady_pool: EnginePool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there before the host has read any decode that was launched behind the prefill. The
    request takes part in the launch right behind its prefill, unless it has a grammar. The host
    is not asked for the token."""
    late, (more, options) = PROMPTS[3], KINDS[kind]
    params = GREEDY | {"max_new_tokens": 30} | more
    expected = generate(steady_pool, [late], [params], **options)
    others = generate(steady_pool, PROMPTS[:2], LONG)
    steady_pool.flush_cache()
    order = Order(steady_pool, late, monkeypatch)
    with callers() as executor:
        first = executor.submit(generate, steady_pool, PROMPTS[:2], LONG)
        assert order.reached.wait(SECONDS)
        call = executor.submit(generate, steady_pool, [late], [params], **options)
        until(lambda: waiting(steady_pool) == 1)
        order.go_on.set()
        same(first.result(SECONDS), others)
        same(call.result(SECONDS), expected)
    behind = order.prefills[-1]
    assert behind > _LAUNCHES
    assert 0 <= order.first <= behind
    decoded = 0 if kind == "grammar" else order.launched[behind]
    assert order.tokens[behind] == 1 + decoded


@pytest.mark.parametrize("tokens", [30, 1])
def test_two_prefills_before_a_launch(
    steady_pool: EnginePool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a grammar no step is launched behind a prefill, so a second prefill may come first.
    Each request continues from its own first token. If the first request ends with that token, the
    second gets its row. The first token and the minimum length of the second count once."""
    one, other = PROMPTS[3:5]
    params = GREEDY | {"max_new_tokens": 30}
    (free,) = generate(steady_pool, [other], [params])
    both = [
        params | {"max_new_tokens": tokens},
        params
        | {"frequency_penalty": 0.7, "min_new_tokens": 20, "ignore_eos": False}
        | {"stop_token_ids": sorted({*free["output_ids"]})},
    ]
    spelled = params | {"regex": "[a-z]{100}", "ignore_eos": False, "max_new_tokens": 100}
    expected = [generate(steady_pool, [p], [q])[0] for p, q in zip((one, other), both, strict=True)]
    letters = generate(steady_pool, PROMPTS[:2], spelled)
    assert expected[0]["output_ids"][0] != expected[1]["output_ids"][0]
    steady_pool.flush_cache()
    prefill, steady = (
        getattr(faults.scheduler_of(steady_pool, 0), name) for name in ("prefill_program", "steady")
    )
    launch, step = prefill.launch, steady.program.step
    decoding, launched, go_on = threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    def launching(*args: Any, **kwargs: Any) -> Any:
        order.append("prefill")
        if order.count("prefill") == 2:  # the requests with the grammar had the first
            launched.set()
            assert go_on.wait(SECONDS)
        return launch(*args, **kwargs)

    def stepping(*args: Any, **new: Any) -> Any:
        order.append("step")
        decoding.set()
        return step(*args, **new)

    monkeypatch.setattr(prefill, "launch", launching)
    monkeypatch.setattr(steady.program, "step", stepping)
    with callers(3) as executor:
        first = executor.submit(generate, steady_pool, PROMPTS[:2], spelled)
        assert decoding.wait(SECONDS)
        calls = [executor.submit(generate, steady_pool, [one], both[:1])]
        assert launched.wait(SECONDS)
        calls.append(executor.submit(generate, steady_pool, [other], both[1:]))
        until(lambda: waiting(steady_pool) == 1)
        go_on.set()
        same([call.result(SECONDS)[0] for call in calls], expected)
        same(first.result(SECONDS), letters)
    joined = order.index("prefill", 1)
    assert order[joined : joined + 2] == ["prefill", "prefill"]


@pytest.mark.parametrize("length", [1, 2, 30])
def test_equal_prompts_that_come_together(steady_pool: EnginePool, length: int) -> None:
    """They share KV pages in the end, while steps that use each one's own pages are in flight.
    Some end with their first token, others with a later one."""
    params = [GREEDY | {"max_new_tokens": tokens} for tokens in (length, 7)]
    prompts = [[5, 6, 7, 8, 9]] * 2
    expected = [generate(steady_pool, prompts[:1], [one])[0] for one in params]
    others = generate(steady_pool, PROMPTS[:2], LONG)
    steady_pool.flush_cache()
    with pytest.MonkeyPatch.context() as patch, callers() as executor:
        order = Order(steady_pool, prompts[0], patch)
        first = executor.submit(generate, steady_pool, PROMPTS[:2], LONG)
        assert order.reached.wait(SECONDS)
        call = executor.submit(generate, steady_pool, prompts, params)
        until(lambda: waiting(steady_pool) == 2)
        order.go_on.set()
        same(first.result(SECONDS), others)
        same(call.result(SECONDS), expected)
    steady_pool.flush_cache()
    assert at_rest(steady_pool)
