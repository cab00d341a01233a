"""Scores beside sampling, swaps, pauses, faults and callers that leave."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from enginepool import EnginePool, InvalidRequest, PoolClosed, RequestsFailed
from tests.support import faults
from tests.support.liveness import SECONDS, at_rest, callers, paused, running, until, waiting
from tests.support.pools import SMALL, MakePool, compilations, same
from tests.support.reference import make_random_model
from tests.support.scores import (
    assert_named,
    assert_prompt_logprobs,
    assert_scores,
    ids,
    reference,
)

# Prompts of eight and of seven pieces of 64 tokens.
LONG = [ids(300), ids(400)], [ids(200, 1), ids(40, 1)]
GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 40}


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [
        make_random_model(tmp_path_factory.mktemp("version"), "qwen3", seed, num_layers=1, std=0.1)
        for seed in (1, 2, 3)
    ]


@contextmanager
def pool_of(devices: int, versions: list[Path]) -> Iterator[EnginePool]:
    options = SMALL | {"max_restarts": 1000}
    with EnginePool(str(versions[0]), devices=devices, **options) as pool:
        yield pool


@contextmanager
def left_as_it_was(pool: EnginePool, versions: list[Path]) -> Iterator[EnginePool]:
    """The pool has version 0 before the test, and nothing runs after it."""
    pool.update_weights(versions[0], weight_version=0)
    yield pool
    until(lambda: {engine["state"] for engine in pool.stats()["engines"]} == {"serving"})
    until(lambda: at_rest(pool))


@pytest.fixture(scope="module")
def opened_one(versions: list[Path]) -> Iterator[EnginePool]:
    with pool_of(1, versions) as pool:
        yield pool


@pytest.fixture(scope="module")
def opened_two(versions: list[Path]) -> Iterator[EnginePool]:
    with pool_of(2, versions) as pool:
        yield pool


@pytest.fixture
def one(opened_one: EnginePool, versions: list[Path]) -> Iterator[EnginePool]:
    """One engine."""
    with left_as_it_was(opened_one, versions) as pool:
        yield pool


@pytest.fixture
def two(opened_two: EnginePool, versions: list[Path]) -> Iterator[EnginePool]:
    """Two engines."""
    with left_as_it_was(opened_two, versions) as pool:
        yield pool


def scorer(pool: EnginePool) -> Any:
    return faults.scheduler_of(pool, 0).scorer


@contextmanager
def under_way(
    pool: EnginePool, call: Callable[[], Any], pieces: int = 3
) -> Iterator[tuple[Any, faults.Hang]]:
    """The block runs while the first engine computes piece number `pieces` of what `call`
    scores."""
    let_go = faults.hang_in_score(pool, 0, at=pieces)
    with callers(1) as executor:
        try:
            answer = executor.submit(call)
            assert let_go.begun.wait(SECONDS)
            yield answer, let_go
        finally:
            let_go.set()


def score(pool: EnginePool, which: tuple[Any, Any] = LONG, **options: Any) -> Any:
    return pool.score(input_ids=which[0], continuation_ids=which[1], **options)


def jobs(pool: EnginePool) -> bool:
    return pool.runtime.workers[0].channel.has_jobs()


@pytest.mark.slow
def test_beside_sampling(two: EnginePool, versions: list[Path]) -> None:
    """Outputs are as without scores, scores are right, nothing is compiled, and both make
    progress."""
    rng = random.Random(3)
    prompts = [ids(rng.choice([3, 60, 150]), n) for n in range(16)]
    pairs = [(ids(rng.randint(1, 250), n), ids(rng.randint(1, 250), n + 50)) for n in range(24)]
    options: Any = {"input_ids": prompts, "return_logprob": True}
    expected = two.generate_all(None, GREEDY, **options)
    with compilations() as seen, callers(3) as executor:
        generated = [
            executor.submit(two.generate_all, None, GREEDY, **options),
            executor.submit(two.generate_all, None, GREEDY, return_prompt_logprob=True, **options),
        ]
        scored = executor.submit(score, two, tuple(zip(*pairs, strict=True)), top_logprobs_num=2)
        for answer in generated:
            same(answer.result(SECONDS), expected)
        results = scored.result(SECONDS)
    assert seen == []
    assert_scores(versions[0], *map(list, zip(*pairs, strict=True)), results)
    assert {result["meta_info"]["engine_index"] for result in results} == {0, 1}
    for prompt, result in zip(prompts, generated[1].result(), strict=True):
        assert_prompt_logprobs(versions[0], prompt, result["meta_info"])


def test_beside_a_long_output(one: EnginePool, versions: list[Path]) -> None:
    """A prompt does not wait for the end of an output. The output's steps do not change."""
    params = GREEDY | {"max_new_tokens": 500}
    with callers(1) as executor:
        answer = executor.submit(one.generate, None, params, input_ids=[5])
        until(lambda: running(one) == 1)
        results = score(one)
        assert running(one) == 1
        assert_scores(versions[0], *LONG, results)
        assert len(answer.result(SECONDS)["output_ids"]) == 500


def test_outputs_that_fill_the_kv_cache(one: EnginePool, versions: list[Path]) -> None:
    """Prompts wait for KV cache of running outputs, or free what they hold. All of them end and
    are right."""
    prompts = [ids(200, n) for n in range(5)]
    params = GREEDY
    options: Any = {"input_ids": prompts, "return_logprob": True}
    expected = one.generate_all(None, params, **options)
    with callers(4) as executor:
        generated = [executor.submit(one.generate_all, None, params, **options) for _ in range(2)]
        scored = [executor.submit(score, one) for _ in range(2)]
        for answer in generated:
            same(answer.result(SECONDS), expected)
        for answer in scored:
            assert_scores(versions[0], *LONG, answer.result(SECONDS))


def test_beside_a_prompt_in_chunks(one: EnginePool, versions: list[Path]) -> None:
    """A prompt that comes between two chunks of another leaves it the KV cache for its rest."""
    which = [ids(500, 1)], [ids(9, 1)]
    options: Any = {"input_ids": [ids(60), ids(500)], "return_logprob": True}
    options["sampling_params"] = [GREEDY, GREEDY | {"max_new_tokens": 8}]
    expected = one.generate_all(**options)
    one.flush_cache()
    before = len(one.events())
    let_go = faults.hang_in_step(one, 0, at=2)
    with callers(2) as executor:
        try:
            generated = executor.submit(one.generate_all, **options)
            assert let_go.begun.wait(SECONDS)
            scored = executor.submit(score, one, which)
            until(lambda: waiting(one) == 1)
        finally:
            let_go.set()
        same(generated.result(SECONDS), expected)
        assert_scores(versions[0], *which, scored.result(SECONDS))
    assert one.events()[before:] == []


NAMED = [7, 200, 0]


def assert_with_named(model: Path, which: tuple[Any, Any], results: Any) -> None:
    assert_scores(model, *which, results)
    for rows, result in zip(reference(model, *which), results, strict=True):
        assert_named(rows, NAMED, result["token_ids_logprobs"])


def test_a_prompt_makes_way(one: EnginePool, versions: list[Path]) -> None:
    """It frees its KV cache in the middle, and starts over."""
    call = lambda: score(one, token_ids_logprob=NAMED)  # noqa: E731
    with under_way(one, call, pieces=7) as (answer, let_go):
        held = scorer(one).holds_kv
        job = one.runtime.workers[0].channel.run(lambda: scorer(one).make_way(1024))
        let_go.set()
        job.result(SECONDS)
        assert_with_named(versions[0], LONG, answer.result(SECONDS))
    assert held


def test_a_prompt_that_never_fits(
    one: EnginePool, versions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the KV cache of a sliding window is smaller. It ends, and later prompts do not
    wait for it. There are more such prompts than an engine runs at a time."""
    allocator = faults.scheduler_of(one, 0).token_to_kv_pool_allocator
    alloc = allocator.alloc

    def small(size: int, *args: Any, **options: Any) -> Any:
        return None if size > 300 else alloc(size, *args, **options)

    monkeypatch.setattr(allocator, "alloc", small)
    prompts = [*(ids(400, n) for n in range(6)), ids(20)]
    *long, short = score(one, (prompts, [ids(8)] * 7), timeout=30.0)
    for result in long:
        assert result["meta_info"]["finish_reason"]["err_type"] == "out_of_memory"
        assert result["logprobs"] == []
    short["meta_info"]["prompt_index"] = 0
    assert_scores(versions[0], prompts[-1:], [ids(8)], [short])


def test_a_prompt_that_leaves_while_it_waits_for_room(
    one: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request in the queue starts, though no step follows."""
    allocator = faults.scheduler_of(one, 0).token_to_kv_pool_allocator
    alloc, held = allocator.alloc, one.runtime.workers[0].channel.running.held

    def small(size: int, *args: Any, **options: Any) -> Any:
        return None if size > 300 else alloc(size, *args, **options)

    monkeypatch.setattr(allocator, "alloc", small)
    first = faults.hang_in_score(one, 0)
    with callers(3) as executor:
        fits = executor.submit(score, one, ([ids(200)], [ids(8)]))
        assert first.begun.wait(SECONDS)
        waits = executor.submit(score, one, ([ids(400)], [ids(8)]), timeout=2.0)
        until(lambda: waiting(one) == 1)
        last = faults.hang_in_score(one, 0, at=3)
        first.set()
        assert last.begun.wait(SECONDS)
        other = executor.submit(one.generate, None, GREEDY, input_ids=[5], timeout=30.0)
        until(lambda: waiting(one) == 1)
        until(lambda: any(request.abort_reason for request in held.values()))
        last.set()
        assert len(other.result(SECONDS)["output_ids"]) == 40
        assert fits.result(SECONDS)[0]["logprobs"]
        assert not waits.result(SECONDS)[0]["logprobs"]


def test_room_that_an_output_of_one_token_leaves(
    make_pool: MakePool, model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When an output ends, another one takes the KV cache for which a prompt waits, and ends with
    its first token. The prompt does not wait 16 steps then."""
    one = make_pool("qwen3", 1, max_decode_steps=1)
    one.flush_cache()
    scheduler, channel = faults.scheduler_of(one, 0), one.runtime.workers[0].channel
    step, deliver = scheduler.scorer.step, scheduler.running.deliver
    ended, scored = dict[int, int](), list[int]()

    def scoring(*args: Any) -> Any:
        scored.append(channel.steps)
        return step(*args)

    def delivering(request: Any, *args: Any) -> None:
        ended[len(request.input_ids)] = channel.steps
        deliver(request, *args)

    monkeypatch.setattr(scheduler.scorer, "step", scoring)
    monkeypatch.setattr(scheduler.running, "deliver", delivering)
    beside = [GREEDY | {"max_new_tokens": count} for count in (90, 45)]
    let_go = faults.hang_in_step(one, 0, at=20)
    with callers(3) as executor:
        executor.submit(one.generate_all, None, beside, input_ids=[ids(420), ids(460)])
        assert let_go.begun.wait(SECONDS)
        executor.submit(one.generate, None, GREEDY | {"max_new_tokens": 1}, input_ids=ids(60))
        prompt = executor.submit(score, one, ([ids(500)], [ids(9)]))
        until(lambda: waiting(one) == 2)
        let_go.set()
        assert_scores(model_dir("qwen3"), [ids(500)], [ids(9)], prompt.result(SECONDS))
    assert ended[460] < ended[60] < scored[0] <= ended[60] + 2
    assert scored[-1] < ended[420]


def test_an_output_that_waits_for_the_kv_cache_of_a_prompt(one: EnginePool) -> None:
    """It starts when the prompt is scored, though no output has ended."""
    long: Any = {"sampling_params": GREEDY | {"max_new_tokens": 400}, "input_ids": [5]}
    with callers(2) as executor:
        output = executor.submit(one.generate, **long)
        until(lambda: running(one) == 1)
        call = lambda: score(one, ([ids(500)], [ids(9)]))  # noqa: E731
        with under_way(one, call) as (answer, let_go):
            late = executor.submit(one.generate, None, GREEDY, input_ids=ids(200))
            until(lambda: waiting(one) == 1)
            let_go.set()
            answer.result(SECONDS)
        assert len(late.result(SECONDS)["output_ids"]) == 40
        assert not output.done()


@pytest.mark.parametrize("mode", ["drain", "retract", "in_place"])
def test_a_swap_in_the_middle_of_a_prompt(one: EnginePool, versions: list[Path], mode: Any) -> None:
    """All values of a result are of the weights that it names. A prompt that has begun ends
    first if the update drains, and otherwise starts over."""
    call = lambda: score(one, token_ids_logprob=NAMED)  # noqa: E731
    with under_way(one, call, pieces=7) as (answer, let_go), callers(1) as executor:
        swap = executor.submit(one.update_weights, versions[1], mode=mode, weight_version=1)
        until(lambda: jobs(one) or mode == "drain")
        let_go.set()
        swap.result(SECONDS)
        results = answer.result(SECONDS)
    found = [result["meta_info"]["weight_version"] for result in results]
    assert found[0] == (0 if mode == "drain" else 1)
    for index, (result, version) in enumerate(zip(results, found, strict=True)):
        part = [LONG[0][index]], [LONG[1][index]]
        result["meta_info"]["prompt_index"] = 0
        assert_with_named(versions[version], part, [result])


def test_a_swap_that_aborts(one: EnginePool, versions: list[Path]) -> None:
    with under_way(one, lambda: score(one)) as (answer, let_go), callers(1) as executor:
        swap = executor.submit(one.update_weights, versions[1], mode="abort", weight_version=1)
        until(lambda: jobs(one))
        let_go.set()
        swap.result(SECONDS)
        for result in answer.result(SECONDS):
            assert result["meta_info"]["finish_reason"]["err_type"] == "cancelled"
            assert result["logprobs"] == []


def test_swaps_do_not_starve_a_prompt(one: EnginePool, versions: list[Path]) -> None:
    """A prompt that one swap sends back to the queue ends before the next swap."""
    with under_way(one, lambda: score(one)) as (answer, let_go), callers(2) as executor:

        def swap(version: int) -> Any:
            return executor.submit(
                one.update_weights, versions[version], mode="retract", weight_version=version
            )

        first = swap(1)
        until(lambda: jobs(one))
        again = faults.hang_in_score(one, 0, at=2)
        let_go.set()
        first.result(SECONDS)
        assert again.begun.wait(SECONDS)
        second = swap(2)
        until(lambda: one.runtime.workers[0].channel._jobs._waiting)  # it may not stop the engine
        again.set()
        results = answer.result(SECONDS)
        second.result(SECONDS)
    assert [result["meta_info"]["weight_version"] for result in results] == [1, 1]
    assert_scores(versions[1], *LONG, results)


def test_an_output_over_a_swap(one: EnginePool, versions: list[Path]) -> None:
    """Its prompt's values stay those of the weights that they name."""
    prompt = ids(100)
    with callers(1) as executor:
        let_go = faults.hang_in_step(one, 0, at=5)
        answer = executor.submit(
            one.generate, input_ids=prompt, sampling_params=GREEDY, return_prompt_logprob=True
        )
        assert let_go.begun.wait(SECONDS)
        with callers(1) as swapper:
            swap = swapper.submit(one.update_weights, versions[1], mode="retract", weight_version=1)
            until(lambda: jobs(one))
            let_go.set()
            swap.result(SECONDS)
        meta = answer.result(SECONDS)["meta_info"]
    assert [version for *_, version in meta["weight_versions"]] == [0, 1]
    assert meta["input_logprobs_weight_version"] == 0
    assert_prompt_logprobs(versions[0], prompt, meta)


# Engines that fail


def test_a_failed_piece(two: EnginePool, versions: list[Path]) -> None:
    """Its prompts are scored on another engine, and the engine comes back."""
    prompts, continuations = [ids(100, n) for n in range(12)], [ids(60, n) for n in range(12)]
    before = len(two.events())
    faults.raise_in_score(two, 0, at=2)
    results = score(two, (prompts, continuations))
    assert_scores(versions[0], prompts, continuations, results)
    until(lambda: "engine_recovered" in [entry["event"] for entry in two.events()[before:]])


def test_weights_of_one_engine_that_are_not_finite(two: EnginePool, versions: list[Path]) -> None:
    """No result has a value that is not finite. The engine gets its sibling's weights."""
    engine = two.engines[0]
    faults.spoil_leaf(two, 0)
    while two.engines[0] is engine:
        assert_scores(versions[0], *LONG, score(two))


def test_a_piece_that_does_not_return(two: EnginePool, versions: list[Path]) -> None:
    let_go = faults.hang_in_score(two, 0)
    try:
        prompts, continuations = [ids(9, n) for n in range(12)], [ids(9, n) for n in range(12)]
        with callers(1) as executor:
            call = executor.submit(score, two, (prompts, continuations))
            faults.abandon(two, let_go, 0)
            results = call.result(SECONDS)
        assert_scores(versions[0], prompts, continuations, results)
        assert two.stats()["engines"][0]["state"] == "abandoned"
    finally:
        let_go.set()
    until(lambda: two.stats()["engines"][0]["state"] == "serving")
    assert_scores(versions[0], *LONG, score(two))


# Callers that leave, pools that pause or close


def test_timeout(one: EnginePool) -> None:
    """Results keep their places. Unfinished ones have no values."""
    held = one.runtime.workers[0].channel.running.held
    call = lambda: score(one, timeout=2.0)  # noqa: E731
    with under_way(one, call) as (answer, let_go):
        until(lambda: all(request.abort_reason for request in held.values()))
        let_go.set()
        results = answer.result(SECONDS)
    for result in results:
        assert result["meta_info"]["finish_reason"]["err_type"] == "timeout"
        assert result["logprobs"] == []
        assert result["meta_info"]["weight_version"] == 0


def test_raise_on_error(one: EnginePool) -> None:
    with paused(one), pytest.raises(RequestsFailed) as caught:
        score(one, timeout=0.1, raise_on_error=True)
    assert [result["logprobs"] for result in caught.value.results] == [[], []]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_cancel(one: EnginePool, backend: str) -> None:
    """The prompts end inside the engine."""
    held = one.runtime.workers[0].channel.running.held
    let_go = faults.hang_in_score(one, 0, at=2)

    async def ask() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: one.async_score(input_ids=LONG[0], continuation_ids=LONG[1]))
            while not let_go.begun.is_set():
                await anyio.sleep(0.01)
            group.cancel_scope.cancel()

    anyio.run(ask, backend=backend)
    assert all(request.abort_reason for request in held.values())
    let_go.set()
    until(lambda: not held)
    assert not scorer(one).holds_kv


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pause(one: EnginePool, versions: list[Path], mode: Any) -> None:
    """While the pool is paused no piece is computed. Afterwards the prompt continues."""
    with under_way(one, lambda: score(one)) as (answer, let_go), callers(1) as executor:
        pause = executor.submit(one.pause_generation, mode)
        until(lambda: jobs(one))
        let_go.set()
        pause.result(SECONDS)
        steps = one.runtime.workers[0].channel.steps
        assert not answer.done()
        assert one.runtime.workers[0].channel.steps == steps
        one.continue_generation()
        assert_scores(versions[0], *LONG, answer.result(SECONDS))


def test_flush_in_the_middle(one: EnginePool, versions: list[Path]) -> None:
    """A flush of the prefix cache takes nothing from a prompt that is being scored."""
    with under_way(one, lambda: score(one)) as (answer, let_go), callers(1) as executor:
        flush = executor.submit(one.flush_cache)
        until(lambda: jobs(one))
        let_go.set()
        flush.result(SECONDS)
        assert_scores(versions[0], *LONG, answer.result(SECONDS))


def test_memory_given_back_in_the_middle(one: EnginePool, versions: list[Path]) -> None:
    with under_way(one, lambda: score(one)) as (answer, let_go), callers(1) as executor:
        given = executor.submit(one.release_memory_occupation)
        until(lambda: jobs(one))
        let_go.set()
        given.result(SECONDS)
        one.resume_memory_occupation()
        assert_scores(versions[0], *LONG, answer.result(SECONDS))


def test_inside_an_update(two: EnginePool, versions: list[Path]) -> None:
    """The call is refused: no engine takes a step, so it would wait for ever."""

    def tensors() -> Iterator[Any]:
        with pytest.raises(InvalidRequest, match="would wait for ever"):
            score(two)
        yield from ()

    with paused(two), pytest.raises(Exception, match="missing"):
        two.update_weights(tensors())


def test_close(versions: list[Path]) -> None:
    pool = EnginePool(str(versions[0]), devices=1, **SMALL).open()
    with under_way(pool, lambda: score(pool)) as (answer, let_go), callers(1) as executor:
        closing = executor.submit(pool.close)
        until(lambda: pool.closed)
        let_go.set()
        with pytest.raises(PoolClosed) as caught:
            answer.result(SECONDS)
        closing.result(SECONDS)
    assert [result["logprobs"] for result in caught.value.results] == [[], []]
    with pytest.raises(PoolClosed):
        score(pool)


@pytest.mark.slow
def test_many_random_calls(make_pool: MakePool, model_dir: Callable[[str], Path]) -> None:
    """A mixture of all calls on four engines compiles nothing, and all scores are right."""
    pool = make_pool("toy", 4)
    rng = random.Random(8)

    def sample() -> None:
        for _ in range(3):
            prompts = [ids(rng.randint(1, 150), rng.randint(0, 9)) for _ in range(8)]
            pool.generate_all(
                None,
                {"max_new_tokens": rng.randint(1, 30), "n": rng.randint(1, 2)},
                input_ids=prompts,
                return_prompt_logprob=rng.random() < 0.5,
                top_logprobs_num=rng.choice([0, 3]),
            )

    made = []
    with compilations() as seen, callers(3) as executor:
        others = [executor.submit(sample) for _ in range(2)]
        for number in range(6):
            pairs = [(ids(rng.randint(1, 250), n), ids(rng.randint(1, 250), n)) for n in range(6)]
            split = tuple(map(list, zip(*pairs, strict=True)))
            made.append((split, score(pool, split, top_logprobs_num=rng.choice([0, 1, 20]))))
            if number % 3 == 2:
                pool.flush_cache()
        for other in others:
            other.result(SECONDS)
    assert seen == []
    for split, results in made:
        assert_scores(model_dir("toy"), *split, results)
    until(lambda: at_rest(pool))
