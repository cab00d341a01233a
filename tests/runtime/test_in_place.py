"""A swap in place, the prefix cache, and prompts that wait."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginepool import EnginePool
from tests.support.faults import hang_in_step
from tests.support.liveness import SECONDS, at_rest, callers, idle, until
from tests.support.pools import SMALL
from tests.support.reference import make_random_model
from tests.support.spans import assert_each_span_is_its_versions, assert_spans

PARAMS = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 8}
SHARED = [3 * i % 250 for i in range(30)]  # so short that routing does not hold back its copies
LONG = [(7 * i + 1) % 250 for i in range(150)]  # three steps: 64 tokens a step


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [
        make_random_model(tmp_path_factory.mktemp("version"), "qwen3", seed, num_layers=1)
        for seed in (1, 2)
    ]


@pytest.fixture
def one(versions: list[Path]) -> Iterator[EnginePool]:
    """One engine, on version 0."""
    with EnginePool(str(versions[0]), devices=1, **SMALL) as pool:
        yield pool


def swap_between_chunks(
    pool: EnginePool, source: Path, waiting: list[list[int]]
) -> list[dict[str, Any]]:
    """Send LONG, then prompts that wait in the engine while LONG is prefilled, and swap in place
    before its last chunk."""
    channel = pool.runtime.workers[0].channel
    until(lambda: idle(pool))
    steps = channel.steps
    # The second is installed first. Each restores what was there before it, when it runs.
    second_step = hang_in_step(pool, 0, at=2)
    first_step = hang_in_step(pool, 0)
    with callers(3) as executor:
        try:
            long = executor.submit(pool.generate, None, PARAMS, input_ids=LONG)
            assert first_step.begun.wait(SECONDS)
            rest = executor.submit(pool.generate_all, None, PARAMS, input_ids=waiting)
            until(lambda: pool.stats()["waiting"] == len(waiting))
            first_step.set()
            assert second_step.begun.wait(SECONDS)
            assert channel.steps == steps + 2
            swap = executor.submit(pool.update_weights, source, mode="in_place", weight_version=1)
            until(channel.has_jobs)  # the swap waits for the step boundary
        finally:
            first_step.set()
            second_step.set()
        swap.result(SECONDS)
        results = [long.result(SECONDS), *rest.result(SECONDS)]
    until(lambda: at_rest(pool))
    assert not pool.events(), "upstream's own count of KV pages is right"
    return results


def test_prompts_that_wait_use_no_prefix_of_old_weights(
    one: EnginePool, versions: list[Path]
) -> None:
    """A prompt that an engine holds and has not prefilled is prefilled by the new weights, even
    if the old ones have left its prefix in the cache."""
    one.generate(input_ids=SHARED, sampling_params=PARAMS)
    results = swap_between_chunks(one, versions[1], [SHARED] * 3)
    assert_spans(results)
    straddling, *waited = results
    assert {r["meta_info"]["weight_version"] for r in results} == {1}
    assert_each_span_is_its_versions([SHARED] * 3, waited, versions)
    assert straddling["meta_info"]["prompt_weight_versions"] == [0, 1]
    assert {tuple(r["meta_info"]["prompt_weight_versions"]) for r in waited} == {(1,)}


def test_cached_tokens_are_those_of_the_prefill(one: EnginePool, versions: list[Path]) -> None:
    """A request waited in the engine while weights changed. It reports what its prefill found in
    the cache afterwards: the last of three copies finds the prefix that the first has left."""
    results = swap_between_chunks(one, versions[1], [SHARED] * 3)
    assert results[-1]["meta_info"]["cached_tokens"] >= len(SHARED) - 1


def test_the_prefix_of_a_prompt_of_two_versions_is_never_found(
    one: EnginePool, versions: list[Path]
) -> None:
    """Half of its KV cache is of the old weights, so the new ones never find it."""
    swap_between_chunks(one, versions[1], [SHARED])
    again = one.generate(input_ids=LONG, sampling_params=PARAMS)
    assert again["meta_info"]["cached_tokens"] == 0
    assert_each_span_is_its_versions([LONG], [again], versions)
    once_more = one.generate(input_ids=LONG, sampling_params=PARAMS)
    assert once_more["meta_info"]["cached_tokens"] >= len(LONG) - 1
    assert once_more["output_ids"] == again["output_ids"]
