"""Decode that stays on its device gives what upstream's own steps give, and lets anything in."""

import random
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

from benchmarks import faults
from enginepool import EnginePool
from tests.support.forced import LINE, assert_greedy
from tests.support.liveness import SECONDS, at_rest, callers, paused, running, until
from tests.support.marks import slow
from tests.support.pools import NATIVE_PAGES, SMALL, MakePool, same
from tests.support.spans import assert_spans
from tests.support.steady import joins, steps, upstreams_own

BUCKETS: dict[str, Any] = {"max_running_requests": 8, "precompile_bs_paddings": [1, 4, 8]}
PROMPTS = [[5 + i, *range(9, 9 + 7 * (i % 5))] for i in range(20)]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def of_any_kind(count: int, *, seed: int) -> list[dict[str, Any]]:
    """What a batch can hold without a step of upstream's own."""
    rng = random.Random(seed)
    return [
        {
            "max_new_tokens": rng.randint(1, 60),
            "temperature": rng.choice([0.0, 0.6, 1.0, 1.4]),
            "sampling_seed": rng.randrange(2**31),
            # Not 1: of that upstream's log-probabilities depend on who else is in the batch.
            "top_k": rng.choice([-1, 3, 20]),
            "top_p": rng.choice([1.0, 0.9, 0.4]),
            "min_p": rng.choice([0.0, 0.1]),
            "ignore_eos": rng.random() < 0.5,
            "stop_token_ids": rng.sample(range(256), rng.choice([0, 3, 30])),
            "stop": rng.choice([[], ["a"], ["zq", "e"]]),
        }
        for _ in range(count)
    ]


def ask(pool: EnginePool, params: Any, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    pool.flush_cache()
    return pool.generate_all(input_ids=prompts, sampling_params=params, return_logprob=True)


@pytest.fixture(scope="module", params=["page_size=1", *slow("page_size=8", "tp_size=2")])
def kind(request: pytest.FixtureRequest, make_pool: MakePool) -> EnginePool:
    name, value = request.param.split("=")
    if request.param == "page_size=8" and not NATIVE_PAGES:
        pytest.skip("this upstream's native attention knows no pages")
    return make_pool("qwen3", 2, **BUCKETS | {name: int(value)})


@pytest.mark.parametrize("seed", [1, 2])
def test_as_upstreams_own_steps(kind: EnginePool, seed: int) -> None:
    """Ids, log-probabilities and reasons of mixed batches, in which rows end by length, by their
    stop ids, by more of these than the device looks for, and by strings."""
    params = of_any_kind(len(PROMPTS), seed=seed)
    with upstreams_own(kind):
        expected = ask(kind, params)
    before = steps(kind)
    results = ask(kind, params)
    steady, fallback = (now - then for now, then in zip(steps(kind), before, strict=True))
    same(results, expected)
    assert steady > 5 * fallback
    assert {r["meta_info"]["finish_reason"]["type"] for r in results} == {"stop", "length"}
    assert {type(r["meta_info"]["finish_reason"].get("matched")) for r in results} >= {int, str}
    kind.flush_cache()
    assert at_rest(kind)


def test_as_the_reference(kind: EnginePool, model_dir: Callable[[str], Path]) -> None:
    """Greedy, alone and beside others that begin and end earlier and later."""
    params = [GREEDY | {"max_new_tokens": 20 + 9 * (i % 6)} for i in range(len(PROMPTS))]
    results = ask(kind, params)
    results += ask(kind, params[:1], PROMPTS[:1])
    count = sum(len(result["output_ids"]) for result in results)
    assert assert_greedy(model_dir("qwen3"), [*PROMPTS, PROMPTS[0]], results) > 0.9 * count


def test_in_bfloat16(make_pool: MakePool) -> None:
    """One program rounds where three do, for batches of the same requests all the time: others
    may differ in bfloat16 anyway."""
    options = {"dtype": "bfloat16", "max_running_requests": 8, "precompile_bs_paddings": [8]}
    pool = make_pool("qwen3", 1, **options)
    prompts = [[5 + i, 9 + i] for i in range(8)]
    always = {"max_new_tokens": 60, "ignore_eos": True, "stop": [], "stop_token_ids": []}
    params = [one | always for one in of_any_kind(8, seed=3)]
    with upstreams_own(pool):
        expected = ask(pool, params, prompts)
    same(ask(pool, params, prompts), expected)


def test_streams_get_every_token(kind: EnginePool) -> None:
    """One by one, in order, and as much as is not streamed."""
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


def test_what_the_script_says(scripted: EnginePool) -> None:
    """A model of which every answer is known, to its end token."""
    text = scripted.generate("ab", {"temperature": 0.0, "max_new_tokens": 40})["text"]
    assert text == LINE[2:]


@pytest.fixture
def pool(make_pool: MakePool) -> Iterator[EnginePool]:
    pool = make_pool("qwen3", 2, **BUCKETS)
    pool.flush_cache()
    yield pool
    until(lambda: at_rest(pool))


LONG = GREEDY | {"max_new_tokens": 200}
LONGER = GREEDY | {"max_new_tokens": 440}


def flying(pool: EnginePool, requests: int) -> None:
    """Return when so many run, and a prefill at least is over."""
    before = sum(engine["steps"] for engine in pool.stats()["engines"])
    until(
        lambda: (
            running(pool) == requests
            and sum(engine["steps"] for engine in pool.stats()["engines"]) > before + 8
        )
    )


@pytest.fixture
def joined() -> Iterator[list[int]]:
    """How many requests joined a flight, each time."""
    with joins() as counts:
        yield counts


def test_requests_join(kind: EnginePool, joined: list[int]) -> None:
    """More than an engine runs at a time: who comes later is prefilled behind a step that is on its
    way, and takes the row of one who has ended."""
    prompts = [[7 + i, *range(3, 3 + 11 * (i % 4))] for i in range(48)]
    params = of_any_kind(len(prompts), seed=5)
    with upstreams_own(kind):
        expected = ask(kind, params, prompts)
    assert not joined
    same(ask(kind, params, prompts), expected)
    assert len(joined) > 5
    kind.flush_cache()
    assert at_rest(kind)


def test_long_prompts_and_penalties_do_not_join(pool: EnginePool, joined: list[int]) -> None:
    """What is prefilled in chunks, or needs upstream's own steps, makes a flight land."""
    prompts = [*PROMPTS[:4], [9] * 150, [8] * 70, *PROMPTS[4:8]]
    params = [GREEDY | {"max_new_tokens": 30 + 7 * i} for i in range(len(prompts))]
    params[1] |= {"frequency_penalty": 0.7}
    params[7] |= {"min_new_tokens": 9, "ignore_eos": False}
    with upstreams_own(pool):
        expected = [
            ask(pool, one, [prompt])[0] for prompt, one in zip(prompts, params, strict=True)
        ]
    pool.flush_cache()
    calls = []
    with callers(len(prompts)) as executor:
        for prompt, one in zip(prompts, params, strict=True):
            before = sum(engine["steps"] for engine in pool.stats()["engines"])
            calls.append(executor.submit(ask_without_flush, pool, one, [prompt]))
            until(lambda b=before: sum(e["steps"] for e in pool.stats()["engines"]) > b + 3)
        for call, right in zip(calls, expected, strict=True):
            same(call.result(SECONDS), [right])


def test_a_request_joins(pool: EnginePool) -> None:
    """One that comes while others fly starts at once, and changes nothing for them."""
    expected = ask(pool, LONG, PROMPTS[:3])
    pool.flush_cache()
    with callers() as executor:
        first = executor.submit(ask, pool, LONG, PROMPTS[:2])
        until(lambda: running(pool) == 2)
        late = pool.generate(
            input_ids=PROMPTS[2], sampling_params=LONG | {"max_new_tokens": 5}, return_logprob=True
        )
        assert not first.done()
        same(first.result(SECONDS), expected[:2])
    assert late["output_ids"] == expected[2]["output_ids"][:5]


def test_a_flushing_and_a_pause_land(pool: EnginePool) -> None:
    """Nothing is in flight at a step boundary: what upstream keeps of a request is all there is."""
    expected = ask(pool, LONGER, PROMPTS[:4])
    pool.flush_cache()
    found: dict[str, int] = {}
    with callers() as executor:
        call = executor.submit(ask_without_flush, pool, LONGER, PROMPTS[:4])
        flying(pool, 4)
        for mode in ("in_place", "retract"):
            with paused(pool, mode):
                for index in range(2):
                    batch = faults.scheduler_of(pool, index).running_batch
                    found.update((req.rid, length) for req, length in of_batch(batch))
        same(call.result(SECONDS), expected)
    assert found


def of_batch(batch: Any) -> Iterator[tuple[Any, int]]:
    """Upstream's requests in a batch, and their lengths by its account, of which all agree."""
    info = batch.reqs_info[0]
    if not info.reqs:
        return
    for req, length in zip(info.reqs, info.seq_lens.tolist(), strict=True):
        assert length == len(req.origin_input_ids) + len(req.output_ids) - 1
        assert length == req.kv_committed_len == req.kv_allocated_len
        yield req, length


@pytest.mark.parametrize("mode", ["in_place", *slow("retract", "drain", "abort")])
def test_spans_are_exact(make_pool: MakePool, model_dir: Callable[[str], Path], mode: Any) -> None:
    """A swap in the middle of a flight: every token is booked on the weights that it came from."""
    pool = make_pool("qwen3", 2, **BUCKETS)
    pool.flush_cache()
    old = faults.scheduler_of(pool, 0).tp_worker.worker.model_runner.model_state_leaves
    flipped = [jax.numpy.flip(leaf) for leaf in old]
    with callers() as executor:
        call = executor.submit(ask_without_flush, pool, LONGER, PROMPTS[:4])
        flying(pool, 4)
        pool.update_weights(flipped, mode=mode, weight_version=1)
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
    "fault", [faults.raise_in_step, faults.raise_after_step, faults.raise_after_bookkeeping]
)
@pytest.mark.parametrize("at", [3, *slow(2, 9)])
def test_a_failed_step_loses_nothing(
    make_pool: MakePool, fault: Callable[..., None], at: int
) -> None:
    pool = make_pool("qwen3", 2, **BUCKETS, max_restarts=10**6)
    expected = ask(pool, LONG, PROMPTS[:6])
    before = len(pool.events())
    pool.flush_cache()
    fault(pool, 1, at)
    same(pool.generate_all(None, LONG, input_ids=PROMPTS[:6], return_logprob=True), expected)
    until(lambda: len(pool.events()) == before + 2)
    same(ask(pool, LONG, PROMPTS[:6]), expected)


def test_a_step_that_hangs_keeps_what_was_fetched(model_dir: Callable[[str], Path]) -> None:
    """Whoever takes its requests away finds every token that its device has given."""
    options = SMALL | BUCKETS | {"step_timeout": 2.0}
    with EnginePool(str(model_dir("qwen3")), devices=2, **options) as pool:
        expected = ask(pool, LONG, PROMPTS[:4])
        pool.flush_cache()
        outputs: dict[int, int] = {}
        let_go = faults.hang_in_step(pool, 1, at=12)
        dispatch = pool._runtime().dispatch
        resume, resumed = dispatch.resume, threading.Event()

        def look(requests: Any) -> None:
            requests = list(requests)
            outputs.update((r.position, len(r.output_ids)) for r in requests)
            resumed.set()
            resume(requests)

        dispatch.resume = look
        try:
            results = ask_without_flush(pool, LONG, PROMPTS[:4])
            assert resumed.is_set()
        finally:
            let_go.set()
        same(results, expected)
        # A prefill and eleven dispatched steps, of which the last two were on their way at most.
        assert outputs
        assert all(count >= 10 for count in outputs.values())


def ask_without_flush(pool: EnginePool, params: Any, prompts: list[list[int]]) -> list[Any]:
    return pool.generate_all(input_ids=prompts, sampling_params=params, return_logprob=True)


def test_numbers_that_are_not_finite(model_dir: Callable[[str], Path]) -> None:
    """Are seen in flight: the engine is reset or rebuilt, and no such token is given to anybody."""
    with EnginePool(str(model_dir("qwen3")), devices=2, **SMALL | BUCKETS) as pool:
        expected = ask(pool, LONGER, PROMPTS[:4])
        pool.flush_cache()
        with callers() as executor:
            call = executor.submit(ask_without_flush, pool, LONGER, PROMPTS[:4])
            flying(pool, 4)
            faults.spoil_leaf(pool, 1)
            same(call.result(SECONDS), expected)
        until(lambda: any(entry["event"] == "engine_recovered" for entry in pool.events()))
        assert "NotFinite" in str(pool.events()[0])


def test_kv_cache_runs_out_in_the_middle(make_pool: MakePool) -> None:
    """What was taken ahead is given up before upstream takes a request back."""
    options = BUCKETS | {"max_total_tokens": 512, "schedule_conservativeness": 0.3}
    pool = make_pool("qwen3", 1, **options)
    prompts, params = PROMPTS[:8], GREEDY | {"max_new_tokens": 100}
    with upstreams_own(pool):
        expected = [ask(pool, params, [prompt])[0] for prompt in prompts]
    before = steps(pool)
    same(ask(pool, params, prompts), expected)
    assert steps(pool)[0] > before[0]
    pool.flush_cache()
    assert at_rest(pool)


def test_engines_say_what_they_cannot_fly(pool: EnginePool) -> None:
    """Penalties are upstream's, and only for as long as such a request runs."""
    steady, fallback = steps(pool)
    params = [LONG | {"max_new_tokens": 40}, LONG | {"max_new_tokens": 8, "frequency_penalty": 0.4}]
    pool.engines[0].generate(None, params, input_ids=PROMPTS[:2])
    now = steps(pool)
    assert 5 <= now[1] - fallback <= 9
    assert now[0] - steady >= 30


def test_an_upstream_that_is_otherwise(
    monkeypatch: pytest.MonkeyPatch, model_dir: Callable[[str], Path]
) -> None:
    """Its steps are its own, and its answers right."""
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
    """The slots of a batch are those that upstream lists: each row's pages, one after the other,
    rows that are empty taking none."""
    import jax.numpy as jnp

    from enginepool.engine.steady.program import _slots_of

    table = np.array([[3, 7, 0], [0, 0, 0], [5, 0, 0], [1, 2, 9]], np.int32)
    lengths = jnp.array([5, 0, 1, 12])
    slots = _slots_of(lengths, jnp.asarray(table), 4, 40)
    pages = [3, 7, 5, 1, 2, 9]
    expected = [page * 4 + i for page in pages for i in range(4)]
    assert slots[: len(expected)].tolist() == expected
    assert set(slots[len(expected) :].tolist()) <= {0, 1, 2, 3}
