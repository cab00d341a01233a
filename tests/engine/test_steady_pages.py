"""Prompts that upstream splits into chunks, because it counts whole pages, beside requests that
decode."""

import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sgl_jax.srt.managers.scheduler import Scheduler

from enginepool import EnginePool
from tests.support import faults
from tests.support.forced import assert_greedy
from tests.support.liveness import SECONDS, at_rest, callers, running, until, waiting
from tests.support.marks import slow, steady_decode
from tests.support.pools import NATIVE_PAGES, MakePool, same
from tests.support.steady import (
    GREEDY,
    LONG,
    OPTIONS,
    ask,
    ask_without_flush,
    decoding,
    joins,
    several_at_once,
)

pytestmark = steady_decode

# Their tokens fit one prefill. Their pages of 16 or 128 do not, so the last is cut.
CHUNK = 256
LENGTHS = [100, 150]
FIRST = [[5 + i, 6, 7] for i in range(3)]
PAGES: dict[str, Any] = OPTIONS | {
    "max_total_tokens": 4096,
    "max_prefill_tokens": CHUNK,
    "chunked_prefill_size": CHUNK,
    "precompile_token_paddings": [CHUNK],
    "precompile_bs_paddings": [8],
    "warmup": "none",
}


@pytest.fixture(scope="module", params=[128, *slow(1, 16)] if NATIVE_PAGES else [1])
def size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def paged(make_pool: MakePool, size: int) -> Iterator[EnginePool]:
    with several_at_once():
        yield make_pool("qwen3", 1, **PAGES | {"page_size": size})


def prompts_of(lengths: list[int]) -> list[list[int]]:
    return [
        [20 + i, *(9 + (j * (i + 3)) % 200 for j in range(n - 1))] for i, n in enumerate(lengths)
    ]


def held_in_flight(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Two events. The first is set when steps were launched. The engine then waits for the
    second."""
    program, launched = faults.scheduler_of(pool, 0).steady.program, 0
    launched_some, may_go_on, step = threading.Event(), threading.Event(), program.step

    def waiting_once(*args: Any, **new: Any) -> Any:
        nonlocal launched
        launched += 1
        if launched == 9:
            launched_some.set()
            assert may_go_on.wait(SECONDS)
        return step(*args, **new)

    monkeypatch.setattr(program, "step", waiting_once)
    return launched_some, may_go_on


def ask_late(
    pool: EnginePool, late: list[list[int]], monkeypatch: pytest.MonkeyPatch, given: int = 0
) -> list[str]:
    """These requests come together while three others decode, with this many tokens of their
    outputs. All must get what they get alone. Returns the engines that failed meanwhile."""
    early, params = [LONG] * len(FIRST), [LONG | {"max_new_tokens": 60}] * len(late)
    alone = [
        ask(pool, one, [prompt])[0]
        for one, prompt in zip(early + params, FIRST + late, strict=True)
    ]
    expected = alone[len(early) :]
    parts = [cut(result, given) if given else None for result in expected]
    before = len(pool.events())
    pool.flush_cache()
    with callers() as executor:
        launched_some, may_go_on = held_in_flight(pool, monkeypatch)
        first = executor.submit(ask_without_flush, pool, early, FIRST)
        assert launched_some.wait(SECONDS)
        rest = executor.submit(ask_without_flush, pool, params, late, partial_outputs=parts)
        until(lambda: waiting(pool) == len(late))
        may_go_on.set()
        same(first.result(SECONDS) + rest.result(SECONDS), alone)
    until(lambda: at_rest(pool))
    return [event["exception"] for event in pool.events()[before:] if "exception" in event]


def cut(result: dict[str, Any], length: int) -> dict[str, Any]:
    """A result as it was after this many tokens."""
    logprobs = result["meta_info"]["output_token_logprobs"][:length]
    return {
        "output_ids": result["output_ids"][:length],
        "meta_info": {"output_token_logprobs": logprobs},
    }


@pytest.mark.parametrize("given", [0, 5])
def test_requests_that_do_not_fit_one_prefill(
    paged: EnginePool, size: int, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New requests, or requests that resume with outputs. Upstream would cut the last. It comes
    with the next prefill, and each joins the steps in flight."""
    late = prompts_of([length - given for length in LENGTHS])
    with joins() as counts:
        assert ask_late(paged, late, monkeypatch, given) == []
    alone = [1] * (len(FIRST) + len(late))
    assert counts == [*alone, len(FIRST), *([2] if size == 1 else [1, 1])]


def test_beside_a_stream_they_come_at_a_step_boundary(
    paged: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No decode step lies between their prefills there, so first tokens come earlier."""
    late, params = prompts_of([200, 150]), [LONG | {"max_new_tokens": 60}] * 2
    expected = [ask(paged, [one], [p])[0] for one, p in zip(params, late, strict=True)]
    paged.flush_cache()
    with joins() as counts, callers() as executor:
        launched_some, may_go_on = held_in_flight(paged, monkeypatch)
        stream = paged.stream(input_ids=FIRST[0], sampling_params=LONG)
        first = executor.submit(list, stream)
        assert launched_some.wait(SECONDS)
        rest = executor.submit(ask_without_flush, paged, params, late)
        until(lambda: waiting(paged) == 2)
        may_go_on.set()
        same(rest.result(SECONDS), expected)
        first.result(SECONDS)
    assert counts == [1, 3]
    until(lambda: at_rest(paged))


def test_upstream_has_the_last_word(paged: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that upstream splits for its own reasons does not join."""
    monkeypatch.setattr(faults.scheduler_of(paged, 0).steady.admission, "_fit_one_prefill", len)
    assert ask_late(paged, prompts_of([100, 200]), monkeypatch) == []


def test_a_request_that_comes_between_two_chunks(
    paged: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream can be told to decode between them (SGL_DECODE_FIRST_INTERLEAVE). It prefills the
    next chunk with new requests, and the chunked request does not join."""
    scheduler = faults.scheduler_of(paged, 0)
    if "_decode_first_n" not in inspect.getsource(Scheduler):
        pytest.skip("this upstream never decodes between two chunks")
    monkeypatch.setattr(scheduler, "chunked_prefill_size", 128)
    monkeypatch.setattr(scheduler, "_decode_first_n", 1, raising=False)
    monkeypatch.setattr(scheduler, "_consec_decode", 0, raising=False)
    held = GREEDY | {"regex": "[a-z]{90}", "max_new_tokens": 95, "ignore_eos": False}
    short = GREEDY | {"max_new_tokens": 40}
    prompts, params = [FIRST[0], *prompts_of([400, 20])], [held, short, short]
    expected = [ask(paged, *both)[0] for both in zip(params, [[p] for p in prompts], strict=True)]
    before = len(paged.events())
    paged.flush_cache()
    program = scheduler.steady.program
    begun, may_go_on, step = threading.Event(), threading.Event(), program.step

    def between_chunks(*args: Any, **new: Any) -> Any:
        if any(scheduler.chunked_reqs) and not begun.is_set():
            begun.set()
            assert may_go_on.wait(SECONDS)
        return step(*args, **new)

    monkeypatch.setattr(program, "step", between_chunks)
    with callers() as executor:
        calls = [executor.submit(ask_without_flush, paged, params[0], prompts[:1])]
        until(lambda: running(paged) == 1)
        calls.append(executor.submit(ask_without_flush, paged, params[1], prompts[1:2]))
        assert begun.wait(SECONDS)
        calls.append(executor.submit(ask_without_flush, paged, params[2], prompts[2:]))
        until(lambda: waiting(paged) == 1)
        may_go_on.set()
        same([call.result(SECONDS)[0] for call in calls], expected)
    assert paged.events()[before:] == []
    until(lambda: at_rest(paged))


@pytest.mark.parametrize("given", [0, 5])
def test_a_request_that_is_prefilled_in_part_is_refused(
    paged: EnginePool, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one joined all the same, the engine is reset, and the answers are right."""
    admission = faults.scheduler_of(paged, 0).steady.admission
    monkeypatch.setattr(admission, "_fit_one_prefill", len)
    monkeypatch.setattr(admission, "_in_chunks", dict)
    (error,) = ask_late(paged, prompts_of([100, 300]), monkeypatch, given)
    assert "cannot decode" in error


@pytest.mark.parametrize("kind", ["swap", "fault"])
def test_requests_that_resume_beside_others(
    make_pool: MakePool, size: int, model_dir: Callable[[str], Path], kind: str
) -> None:
    """After a swap to the same weights that retracts, or on another engine after theirs has
    failed."""
    pool = make_pool("qwen3", 2, **PAGES | {"page_size": size})
    pool.flush_cache()
    prompts = prompts_of([20 + 37 * (i % 5) for i in range(20)])
    lengths = [60 + 11 * (i % 7) for i in range(len(prompts))]
    params = [GREEDY | {"max_new_tokens": length} for length in lengths]
    before = len(pool.events())
    with callers() as executor:
        call = executor.submit(ask_without_flush, pool, params, prompts)
        decoding(pool, 16)
        if kind == "swap":
            for _ in range(2):
                pool.update_weights(model_dir("qwen3"), mode="retract")
        else:
            faults.raise_after_step(pool, 1, 5)
        results = call.result(SECONDS)
    assert [len(result["output_ids"]) for result in results] == lengths
    assert assert_greedy(model_dir("qwen3"), prompts, results) > 0.9 * sum(lengths)
    failures = [e for e in pool.events()[before:] if e["event"] == "engine_quarantined"]
    assert [e["engine"] for e in failures] == ([1] if kind == "fault" else [])
    until(lambda: at_rest(pool))
