"""Steady decode gives what upstream's own steps give, and everything else can run beside it."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from enginepool import EnginePool
from tests.support import faults
from tests.support.forced import LINE, assert_greedy
from tests.support.liveness import SECONDS, at_rest, callers, paused, running, until, waiting
from tests.support.marks import slow, steady_decode
from tests.support.pools import NATIVE_PAGES, SMALL, MakePool, same
from tests.support.spans import assert_spans
from tests.support.steady import (
    GREEDY,
    LONG,
    LONGER,
    PROMPTS,
    ask,
    ask_without_flush,
    decoding,
    of_any_kind,
    penalised,
    steps,
    upstreams_own,
)

pytestmark = steady_decode

# Pools for one test, which open faster. The second compiles programs when they are used.
ONE_BUCKET: dict[str, Any] = {"precompile_bs_paddings": [8]}
COLD: dict[str, Any] = ONE_BUCKET | {"warmup": "none"}


@pytest.mark.parametrize("seed", [1, *slow(3)])
def test_as_upstreams_own_steps(kind: EnginePool, seed: int) -> None:
    """Ids, log-probabilities and finish reasons of mixed batches. Rows end by length, by stop
    ids, by more stop ids than the device looks for, and by stop strings."""
    params = of_any_kind(len(PROMPTS), seed=seed)
    with upstreams_own(kind):
        expected = ask(kind, params)
    before = steps(kind)
    results = ask(kind, params)
    steady, fallback = (now - then for now, then in zip(steps(kind), before, strict=True))
    same(results, expected)
    assert steady > fallback == 0
    assert {r["meta_info"]["finish_reason"]["type"] for r in results} == {"stop", "length"}
    assert {type(r["meta_info"]["finish_reason"].get("matched")) for r in results} >= {int, str}
    kind.flush_cache()
    assert at_rest(kind)


def test_as_the_reference(kind: EnginePool) -> None:
    """Greedy requests, alone and beside others that begin and end earlier and later."""
    params = [GREEDY | {"max_new_tokens": 20 + 9 * (i % 6)} for i in range(len(PROMPTS))]
    results = ask(kind, params)
    results += ask(kind, params[:1], PROMPTS[:1])
    count = sum(len(result["output_ids"]) for result in results)
    assert assert_greedy(Path(kind.config.model), [*PROMPTS, PROMPTS[0]], results) > 0.9 * count


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [of_any_kind, penalised])
def test_in_bfloat16(
    make_pool: MakePool, kinds: Callable[..., list[dict[str, Any]]], options: dict[str, Any]
) -> None:
    """One program rounds as three do, for batches whose requests stay the same. Other batches
    may differ in bfloat16 anyway."""
    pool = make_pool("qwen3", 1, **options | COLD | {"dtype": "bfloat16"})
    prompts = [[5 + i, 9 + i] for i in range(8)]
    always = {"max_new_tokens": 60, "ignore_eos": True, "stop": [], "stop_token_ids": []}
    params = [one | always for one in kinds(8, seed=3)]
    with upstreams_own(pool):
        expected = ask(pool, params, prompts)
    before = steps(pool)
    same(ask(pool, params, prompts), expected)
    assert steps(pool)[0] >= before[0] + 59


def test_streams_get_every_token(kind: EnginePool) -> None:
    """One by one and in order, as many as without a stream."""
    params = of_any_kind(8, seed=4)
    expected = ask(kind, params, PROMPTS[:8])
    kind.flush_cache()
    seen: dict[int, list[list[int]]] = {}
    before = steps(kind)
    for chunk in kind.stream(input_ids=PROMPTS[:8], sampling_params=params):
        seen.setdefault(chunk["index"], []).append(chunk["output_ids"])
    assert steps(kind)[0] > before[0]
    for index, outputs in seen.items():
        assert outputs[-1] == expected[index]["output_ids"]
        assert all(b[: len(a)] == a for a, b in pairwise(outputs))


def test_streams_by_interval(
    make_pool: MakePool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller who wants every third token also gets the tokens that came with it."""
    pool = make_pool("qwen3", 1, **options | COLD | {"stream_interval": 3})
    held, offered = faults.scheduler_of(pool, 0).running, list[int]()
    publish = held.publish

    def looking(request: Any) -> None:
        publish(request)
        offered.append(len(request.output_ids))

    monkeypatch.setattr(held, "publish", looking)
    *_, last = pool.stream(input_ids=PROMPTS[0], sampling_params=LONG)
    assert len(last["output_ids"]) == 200
    at_once = pool.config.max_decode_steps
    assert all(b - a <= 3 - 1 + at_once for a, b in pairwise([0, *offered, 200]))


def test_one_step_a_launch_where_somebody_would_notice(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that never waits, launches have several steps only while no request streams
    and none waits."""
    monkeypatch.setattr("enginepool.engine.steady.pace._IDLE", sys.maxsize)
    pool = make_pool("qwen3", 1, warmup="none")

    def steps_a_launch(call: Callable[[], Any]) -> float:
        names = ("steady_steps", "steady_dispatches")
        before = pool.stats()["engines"][0]
        call()
        now = pool.stats()["engines"][0]
        steps, launches = (now[name] - before[name] for name in names)
        return steps / launches

    ask(pool, LONG, PROMPTS[:4])  # a step's time is known from here on
    assert steps_a_launch(lambda: ask(pool, LONG, PROMPTS[:4])) > 2
    stream = pool.stream(input_ids=PROMPTS[0], sampling_params=LONG)
    assert steps_a_launch(lambda: list(stream)) == 1
    # During the first half of the steps a request waits for a row.
    assert steps_a_launch(lambda: ask(pool, LONG, PROMPTS[:8])) < 2


def test_what_the_script_says(scripted: EnginePool) -> None:
    """Every answer of this model is known, up to its end token."""
    text = scripted.generate("ab", {"temperature": 0.0, "max_new_tokens": 40})["text"]
    assert text == LINE[2:]


def test_requests_join(kind: EnginePool, joined: list[int]) -> None:
    """There are more requests than an engine runs at a time. A later one is prefilled behind a
    step in flight and takes the row of one that has ended."""
    prompts = [[7 + i, *range(3, 3 + 11 * (i % 4))] for i in range(48)]
    params = of_any_kind(len(prompts), seed=5)
    with upstreams_own(kind):
        expected = ask(kind, params, prompts)
    assert not joined
    same(ask(kind, params, prompts), expected)
    assert joined
    kind.flush_cache()
    assert at_rest(kind)


def steps_of_all(pool: EnginePool) -> int:
    return sum(engine["steps"] for engine in pool.stats()["engines"])


def test_long_prompts_do_not_join_and_penalties_do(
    steady_pool: EnginePool, joined: list[int]
) -> None:
    """A prompt that is prefilled in chunks needs a step boundary. Requests come one by one."""
    prompts = [*PROMPTS[:4], [9] * 150, [8] * 70, *PROMPTS[4:8]]
    # The first three run long enough for the fourth to come to them, whose bucket has a row free.
    lengths = [240, 220, 200, *(30 + 7 * i for i in range(3, len(prompts)))]
    params = [GREEDY | {"max_new_tokens": length} for length in lengths]
    params[1] |= {"frequency_penalty": 0.7}
    params[7] |= {"min_new_tokens": 9, "ignore_eos": False}
    with upstreams_own(steady_pool):
        expected = [
            ask(steady_pool, one, [prompt])[0] for prompt, one in zip(prompts, params, strict=True)
        ]
    # On a busy machine the caller may be too late, when all others have ended.
    rounds = 0
    while not joined and (rounds := rounds + 1) <= 10:
        steady_pool.flush_cache()
        calls = []
        with callers(len(prompts)) as executor:
            for prompt, one in zip(prompts, params, strict=True):
                before = steps_of_all(steady_pool)
                calls.append(executor.submit(ask_without_flush, steady_pool, one, [prompt]))
                until(lambda b=before: steps_of_all(steady_pool) > b + 3)
            for call, right in zip(calls, expected, strict=True):
                same(call.result(SECONDS), [right])
    assert joined


def test_a_request_joins(steady_pool: EnginePool) -> None:
    """A request that comes while others decode starts at once, and changes nothing for them."""
    expected = ask(steady_pool, LONGER, PROMPTS[:3])
    steady_pool.flush_cache()
    with callers() as executor:
        first = executor.submit(ask, steady_pool, LONGER, PROMPTS[:2])
        until(lambda: running(steady_pool) == 2)
        late = steady_pool.generate(
            input_ids=PROMPTS[2], sampling_params=LONG | {"max_new_tokens": 5}, return_logprob=True
        )
        assert not first.done()
        same(first.result(SECONDS), expected[:2])
    assert late["output_ids"] == expected[2]["output_ids"][:5]


@pytest.mark.parametrize("size", [16, 128])
@pytest.mark.slow
def test_page_sizes(make_pool: MakePool, options: dict[str, Any], size: int) -> None:
    """Some requests have one page, others several and a part. Later requests take pages that
    others have freed."""
    if not NATIVE_PAGES:
        pytest.skip("this upstream's native attention knows no pages")
    options |= {"page_size": size, "max_total_tokens": 4096, "chunked_prefill_size": size}
    options |= {"max_prefill_tokens": 128, "precompile_token_paddings": [128]}
    pool = make_pool("qwen3", 1, **options | ONE_BUCKET)
    prompts = [[7 + i, *range(3, 3 + 5 * (i % 7))] for i in range(30)]
    params = penalised(30, seed=12)
    for number, one in enumerate(params):
        one["max_new_tokens"] = 60 + 9 * (number % 20)
    with upstreams_own(pool):
        expected = ask(pool, params, prompts)
    before = steps(pool)
    same(ask(pool, params, prompts), expected)
    assert steps(pool)[0] > before[0]
    pool.flush_cache()
    assert at_rest(pool)


def test_an_abort_in_flight(steady_pool: EnginePool) -> None:
    """It ends its own request, which keeps its tokens. Others continue."""
    expected = ask(steady_pool, LONG, PROMPTS[:4])
    steady_pool.flush_cache()
    with callers() as executor:
        call = executor.submit(ask_without_flush, steady_pool, LONG, PROMPTS[:3])
        until(lambda: running(steady_pool) == 3)
        aborted, last = 0, dict[str, Any]()
        for last in steady_pool.stream(input_ids=PROMPTS[3], sampling_params=LONGER):
            if len(last["output_ids"]) >= 20 and not aborted:
                aborted = steady_pool.abort_request(last["meta_info"]["id"])
        assert aborted == 1
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        assert 20 <= len(last["output_ids"]) < 440
        prefix = expected[3]["output_ids"][: len(last["output_ids"])]
        assert last["output_ids"][: len(prefix)] == prefix
        same(call.result(SECONDS), expected[:3])
    steady_pool.flush_cache()
    assert at_rest(steady_pool)


def test_pages_allocated_ahead_are_freed_for_a_request(
    make_pool: MakePool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request starts at once if it fits only without pages that were allocated ahead."""
    pool = make_pool("qwen3", 1, **options | COLD | {"max_total_tokens": 192})
    prompts = [[5, 6]], [[*range(9, 9 + 60)]]
    params = [LONG | {"max_new_tokens": tokens} for tokens in (90, 30)]
    expected = [ask(pool, *both)[0] for both in zip(params, prompts, strict=True)]
    pool.flush_cache()
    program, launched = faults.scheduler_of(pool, 0).steady.program, 0
    launched_some, arrived, step = threading.Event(), threading.Event(), program.step

    def until_it_has_come(*args: Any, **new: Any) -> Any:
        nonlocal launched
        launched += 1
        if launched == 9:
            launched_some.set()
            assert arrived.wait(SECONDS)
        return step(*args, **new)

    monkeypatch.setattr(program, "step", until_it_has_come)
    before = steps(pool)
    with callers() as executor:
        first = executor.submit(ask_without_flush, pool, params[0], prompts[0])
        assert launched_some.wait(SECONDS)
        late = executor.submit(ask_without_flush, pool, params[1], prompts[1])
        until(lambda: waiting(pool) == 1)
        arrived.set()
        same(first.result(SECONDS) + late.result(SECONDS), expected)
    assert sum(steps(pool)) - sum(before) < 89 + 29  # not one after the other


def test_a_flush_and_a_pause_in_flight(steady_pool: EnginePool) -> None:
    """No step is in flight at a step boundary, so upstream's view of a request is complete."""
    expected = ask(steady_pool, LONGER, PROMPTS[:4])
    steady_pool.flush_cache()
    found: dict[str, int] = {}
    with callers() as executor:
        call = executor.submit(ask_without_flush, steady_pool, LONGER, PROMPTS[:4])
        decoding(steady_pool, 4)
        for mode in ("in_place", "retract"):
            with paused(steady_pool, mode):
                for index in range(2):
                    batch = faults.scheduler_of(steady_pool, index).running_batch
                    found.update((req.rid, length) for req, length in of_batch(batch))
        same(call.result(SECONDS), expected)
    assert found


def of_batch(batch: Any) -> Iterator[tuple[Any, int]]:
    """Upstream's requests in a batch, and their lengths. All of upstream's records of a length
    must agree."""
    info = batch.reqs_info[0]
    if not info.reqs:
        return
    for req, length in zip(info.reqs, info.seq_lens.tolist(), strict=True):
        assert length == len(req.origin_input_ids) + len(req.output_ids) - 1
        assert length == req.kv_committed_len == req.kv_allocated_len
        yield req, length


@pytest.mark.parametrize("mode", ["in_place", "retract", *slow("drain", "abort")])
def test_spans_are_exact(
    make_pool: MakePool, model_dir: Callable[[str], Path], options: dict[str, Any], mode: Any
) -> None:
    """In a swap while steps are in flight, every token counts for the weights that sampled it."""
    pool = make_pool("qwen3", 2, **options)
    pool.flush_cache()
    old = faults.scheduler_of(pool, 0).tp_worker.worker.model_runner.model_state_leaves
    # Before any step, because all may have ended by the time something is compiled.
    staged = pool.stage_weights([jax.numpy.flip(leaf) for leaf in old], weight_version=1)
    with callers() as executor:
        call = executor.submit(ask_without_flush, pool, LONGER, PROMPTS[:4])
        decoding(pool, 4)
        staged.commit(mode)
        results = call.result(SECONDS)
    pool.update_weights(model_dir("qwen3"), weight_version=0)
    assert_spans(results)
    mixed = [result for result in results if len(result["meta_info"]["weight_versions"]) > 1]
    assert bool(mixed) == (mode in ("in_place", "retract"))
    for result, prompt in zip(results, PROMPTS, strict=False):
        start, end, version = result["meta_info"]["weight_versions"][0]
        assert (start, version) == (0, 0)
        part = result | {"output_ids": result["output_ids"][:end]}
        part["meta_info"] = result["meta_info"] | {
            "completion_tokens": end,
            "output_token_logprobs": result["meta_info"]["output_token_logprobs"][:end],
        }
        assert assert_greedy(model_dir("qwen3"), [prompt], [part])


@pytest.mark.parametrize(
    "fault", [faults.raise_after_step, *slow(faults.raise_in_step, faults.raise_after_bookkeeping)]
)
@pytest.mark.parametrize("at", [9, *slow(2, 3)])
def test_a_failed_step_loses_nothing(
    make_pool: MakePool, options: dict[str, Any], fault: Callable[..., None], at: int
) -> None:
    pool = make_pool("qwen3", 2, **options)
    expected = ask(pool, LONG, PROMPTS[:6])
    before = len(pool.events())
    pool.flush_cache()
    fault(pool, 1, at)
    same(pool.generate_all(None, LONG, input_ids=PROMPTS[:6], return_logprob=True), expected)
    until(lambda: len(pool.events()) == before + 2)
    same(ask(pool, LONG, PROMPTS[:6]), expected)


def test_a_step_that_hangs_keeps_what_was_fetched(
    steady_pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When its requests are taken away, they have every token that the host has read."""
    expected = ask(steady_pool, LONG, PROMPTS[:4])
    steady_pool.flush_cache()
    outputs: dict[int, int] = {}
    let_go = faults.hang_in_step(steady_pool, 1, at=12)
    dispatch = steady_pool.runtime.dispatch
    resume, resumed = dispatch.resume, threading.Event()

    def look(requests: Any) -> None:
        requests = list(requests)
        outputs.update((r.position, len(r.output_ids)) for r in requests)
        resumed.set()
        resume(requests)

    monkeypatch.setattr(dispatch, "resume", look)
    try:
        with callers(1) as executor:
            call = executor.submit(ask_without_flush, steady_pool, LONG, PROMPTS[:4])
            faults.abandon(steady_pool, let_go, 1)
            results = call.result(SECONDS)
        assert resumed.is_set()
    finally:
        let_go.set()
    same(results, expected)
    # A prefill and eleven launched steps, of which the last two were on their way at most.
    assert outputs
    assert all(count >= 10 for count in outputs.values())
    until(lambda: steady_pool.stats()["engines"][1]["state"] == "serving")


def test_an_admission_that_hangs(steady_pool: EnginePool) -> None:
    """Its requests are taken away, and run on another engine. When it returns, they do not notice
    it."""
    pool, prompts, params = steady_pool, PROMPTS[:5], LONG | {"max_new_tokens": 120}
    expected = ask(pool, params, prompts)
    pool.flush_cache()
    admitted, go_on = threading.Event(), threading.Event()

    def waiting_once(launch: Callable[..., Any]) -> Callable[..., Any]:
        def launching(*args: Any, **kwargs: Any) -> Any:
            admitted.set()
            assert go_on.wait(SECONDS)
            return launch(*args, **kwargs)

        return launching

    one, other = (faults.hang_in_step(pool, index, at=4) for index in range(2))
    hanging: list[threading.Event] = [one, other, go_on]
    with callers(3) as executor:
        try:
            pinned: Any = pool.engines[0]
            options = {"input_ids": prompts[:2], "sampling_params": params, "return_logprob": True}
            calls = [executor.submit(pinned.generate, **options)]
            assert one.begun.wait(SECONDS)
            calls.append(executor.submit(ask_without_flush, pool, params, prompts[2:4]))
            assert other.begun.wait(SECONDS)
            calls.append(executor.submit(ask_without_flush, pool, params, prompts[4:]))
            until(lambda: waiting(pool) == 1)
            hanging.append(admission := faults.hang_in_admission(pool, 1))
            other.set()
            faults.abandon(pool, admission, 1)
            undo = faults.every_prefill(faults.scheduler_of(pool, 0), waiting_once)
            one.set()
            assert admitted.wait(SECONDS)
            undo()
            admission.set()
            until(lambda: pool.stats()["engines"][1]["state"] == "serving")
            go_on.set()
            same([result for call in calls for result in call.result(SECONDS)], expected)
        finally:
            for event in hanging:
                event.set()


def test_numbers_that_are_not_finite(
    steady_pool: EnginePool, model_dir: Callable[[str], Path]
) -> None:
    """They are noticed in flight. The engine is reset or rebuilt, and no caller gets such a
    token."""
    pool, before = steady_pool, len(steady_pool.events())
    expected = ask(pool, LONGER, PROMPTS[:4])
    pool.flush_cache()
    with callers() as executor:
        call = executor.submit(ask_without_flush, pool, LONGER, PROMPTS[:4])
        decoding(pool, 4)
        faults.spoil_leaf(pool, 1)
        same(call.result(SECONDS), expected)
    until(lambda: any(entry["event"] == "engine_recovered" for entry in pool.events()[before:]))
    assert "NotFinite" in str(pool.events()[before])
    until(lambda: {engine["state"] for engine in pool.stats()["engines"]} == {"serving"})
    pool.update_weights(model_dir("qwen3"), weight_version=0)  # a reset keeps the spoilt weights


@pytest.mark.parametrize("fault", [faults.delete_leaf, *slow(faults.delete_kv_cache)])
def test_arrays_that_are_gone(
    make_pool: MakePool, options: dict[str, Any], fault: Callable[..., None]
) -> None:
    """They disappear in flight, and the next step cannot be launched. The requests continue on
    another engine with every token that was read."""
    pool = make_pool("qwen3", 2, **options)
    expected = ask(pool, LONGER, PROMPTS[:4])
    before = len(pool.events())
    pool.flush_cache()
    with callers() as executor:
        call = executor.submit(ask_without_flush, pool, LONGER, PROMPTS[:4])
        decoding(pool, 4)
        program, happened = faults.scheduler_of(pool, 1).steady.program, threading.Event()
        step = program.step

        def without(*args: Any, **new: Any) -> Any:
            if not happened.is_set():
                fault(pool, 1)
                happened.set()
            return step(*args, **new)

        program.step = without
        try:
            assert happened.wait(SECONDS)
            same(call.result(SECONDS), expected)
        finally:
            del program.step
    until(lambda: any(e["event"] == "engine_recovered" for e in pool.events()[before:]))
    same(ask(pool, LONG, PROMPTS[:4]), [cut(result, 200) for result in expected])


def cut(result: dict[str, Any], tokens: int) -> dict[str, Any]:
    """A greedy result that ended by length, cut to this many tokens."""
    about = result["meta_info"]
    logprobs = about["output_token_logprobs"][:tokens]
    reason = {"type": "length", "length": tokens}
    about = about | {"output_token_logprobs": logprobs, "finish_reason": reason}
    return result | {"output_ids": result["output_ids"][:tokens], "meta_info": about}


@pytest.mark.slow
def test_kv_cache_runs_out_in_the_middle(
    make_pool: MakePool, options: dict[str, Any], retracted: list[int]
) -> None:
    """Upstream retracts requests with their tokens, and continues them later."""
    options |= ONE_BUCKET | {"max_total_tokens": 512, "schedule_conservativeness": 0.3}
    pool = make_pool("qwen3", 1, **options)
    # They may end early. For requests that may not, upstream reserves their whole length.
    params = {"temperature": 0.0, "max_new_tokens": 100, "frequency_penalty": 0.2}
    prompts = PROMPTS[:8]
    with upstreams_own(pool):
        expected = [ask(pool, params, [prompt])[0] for prompt in prompts]
    assert not retracted
    before = steps(pool)
    same(ask(pool, params, prompts), expected)
    assert sum(retracted) > 0
    assert steps(pool)[0] > before[0]
    pool.flush_cache()
    assert at_rest(pool)


def test_an_upstream_with_other_parts(
    monkeypatch: pytest.MonkeyPatch, model_dir: Callable[[str], Path]
) -> None:
    """It runs its own steps, and its answers are right."""
    monkeypatch.setattr("enginepool.engine.steady.program._ATTENTION", ())
    options = SMALL | {"warmup": "none"}
    with EnginePool(str(model_dir("toy")), devices=1, **options) as pool:
        assert pool.generate("12+7=")["text"] == "19"
        steady, fallback = steps(pool)
    assert steady == 0
    assert fallback > 0


@pytest.mark.slow
def test_switched_off() -> None:
    """ENGINEPOOL_OPTIMISATIONS=0 leaves every step to upstream."""
    script = (
        "from enginepool import EnginePool\n"
        "with EnginePool(devices=1, warmup='none') as pool:\n"
        "    print(pool.generate('12+7=')['text'], pool.stats()['engines'][0]['steady_steps'])\n"
    )
    said = {}
    for value in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env={"JAX_PLATFORMS": "cpu", "ENGINEPOOL_OPTIMISATIONS": value},
        )
        said[value] = done.stdout.split()
    assert said["0"] == ["19", "0"]
    assert said["1"][0] == "19"
    assert int(said["1"][1]) > 0


def test_positions_of_slots() -> None:
    """The slots of a batch are those that upstream lists: the pages of each row in turn. Empty
    rows have none."""
    import jax.numpy as jnp

    from enginepool.engine.steady.forward import slots_of

    table = np.array([[3, 7, 0], [0, 0, 0], [5, 0, 0], [1, 2, 9]], np.int32)
    lengths = jnp.array([5, 0, 1, 12])
    slots = slots_of(lengths, jnp.asarray(table), 4, 40)
    pages = [3, 7, 5, 1, 2, 9]
    expected = [page * 4 + i for page in pages for i in range(4)]
    assert slots[: len(expected)].tolist() == expected
    assert set(slots[len(expected) :].tolist()) <= {0, 1, 2, 3}
