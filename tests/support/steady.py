"""Pools with steady decode, the same pools without, and the requests that tests send to both."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from enginepool import EnginePool
from tests.support.faults import scheduler_of
from tests.support.liveness import running, until

# As few kinds of pools as possible, because the session's `make_pool` opens each once.
OPTIONS: dict[str, Any] = {
    "max_running_requests": 8,
    "precompile_bs_paddings": [1, 8],
    "max_restarts": 10**6,
}
PROMPTS = [[5 + i, *range(9, 9 + 7 * (i % 5))] for i in range(20)]
GREEDY = {"temperature": 0.0, "ignore_eos": True}
LONG = GREEDY | {"max_new_tokens": 200}
LONGER = GREEDY | {"max_new_tokens": 440}


def steps(pool: EnginePool) -> tuple[int, int]:
    """Decode steps so far: steady ones, and upstream's own."""
    engines = pool.stats()["engines"]
    return tuple(sum(e[key] for e in engines) for key in ("steady_steps", "fallback_steps"))


@contextmanager
def upstreams_own(pool: EnginePool) -> Iterator[None]:
    """Inside the block all steps of this pool are upstream's own. The pool must be idle now and
    at the end."""
    steady = [scheduler_of(pool, index).steady for index in range(len(pool.engines))]
    programs = [(one.program, one.prefill) for one in steady]
    for one in steady:
        one.program = one.prefill = None
    try:
        yield
    finally:
        for one, (program, prefill) in zip(steady, programs, strict=True):
            one.program, one.prefill = program, prefill


@contextmanager
def several_at_once() -> Iterator[None]:
    """Pools that may launch several steps at once do so, whether their devices wait or not, and
    however short outputs are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("enginepool.engine.steady.pace._IDLE", 0)
        patch.setattr("enginepool.engine.steady.pace._SHARE", 1)
        yield


@contextmanager
def joins() -> Iterator[list[int]]:
    """How many requests join the steps in flight inside the block, each time."""
    from enginepool.engine.steady.in_flight import StepsInFlight

    counts: list[int] = []
    add_requests = StepsInFlight.add_requests

    def counting(self: Any, reqs: list[Any], *args: Any) -> Any:
        counts.append(len(reqs))
        return add_requests(self, reqs, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepsInFlight, "add_requests", counting)
        yield counts


@contextmanager
def counted(places: list[tuple[Any, str]]) -> Iterator[list[int]]:
    """How often these methods are called inside the block."""
    counts = [0] * len(places)
    with pytest.MonkeyPatch.context() as patch:
        for index, (owner, name) in enumerate(places):
            method = getattr(owner, name)

            def counting(*args: Any, index: int = index, method: Any = method) -> Any:
                counts[index] += 1
                return method(*args)

            patch.setattr(owner, name, counting)
        yield counts


def of_any_kind(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Parameters of any kind, except penalties and grammars."""
    rng = random.Random(seed)
    return [
        {
            "max_new_tokens": rng.randint(1, 60),
            "temperature": rng.choice([0.0, 0.6, 1.0, 1.4]),
            "sampling_seed": rng.randrange(2**31),
            "top_k": rng.choice([-1, 1, 3, 20]),
            "top_p": rng.choice([1.0, 0.9, 0.4]),
            "min_p": rng.choice([0.0, 0.1]),
            "ignore_eos": rng.random() < 0.5,
            "stop_token_ids": rng.sample(range(256), rng.choice([0, 3, 30])),
            "stop": rng.choice([[], ["a"], ["zq", "e"]]),
        }
        for _ in range(count)
    ]


def penalised(count: int, *, seed: int) -> list[dict[str, Any]]:
    """The same, where two in three have penalties or a minimum length."""
    rng = random.Random(-seed)
    params = of_any_kind(count, seed=seed)
    for one in params:
        kinds = rng.sample(["frequency_penalty", "presence_penalty", "min_new_tokens"], 2)
        if rng.random() < 0.67:
            one |= {kind: rng.uniform(-1.5, 1.5) for kind in kinds}
        if one.get("min_new_tokens"):
            one["min_new_tokens"] = rng.randint(1, one["max_new_tokens"])
    return params


def ask(
    pool: EnginePool, params: Any, prompts: list[list[int]] = PROMPTS, **options: Any
) -> list[Any]:
    pool.flush_cache()
    return ask_without_flush(pool, params, prompts, **options)


def ask_without_flush(
    pool: EnginePool, params: Any, prompts: list[list[int]], **options: Any
) -> list[Any]:
    return pool.generate_all(
        input_ids=prompts, sampling_params=params, return_logprob=True, **options
    )


def same_top(results: list[Any], expected: list[Any]) -> None:
    """The most probable ids with log-probabilities within 1e-4. Two ids that are as close to
    each other may be swapped, also at the end of the list."""
    for result, other in zip(results, expected, strict=True):
        both = (one["meta_info"]["output_top_logprobs"] for one in (result, other))
        for got, wanted in zip(*both, strict=True):
            values = [entry[0] for entry in wanted]
            assert [entry[0] for entry in got] == pytest.approx(values, abs=1e-4)
            by_id = {entry[1]: entry[0] for entry in wanted}
            for value, one, _ in got:
                assert value == pytest.approx(by_id.get(one, values[-1]), abs=1e-4)


def decoding(pool: EnginePool, requests: int) -> None:
    """Return when this many requests run and at least one prefill is over."""
    before = sum(engine["steps"] for engine in pool.stats()["engines"])
    until(
        lambda: (
            running(pool) == requests
            and sum(engine["steps"] for engine in pool.stats()["engines"]) > before + 8
        )
    )
