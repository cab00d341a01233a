"""Swaps under load: no output is lost, every token is booked on the weights that it came from."""

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forced import output_logits
from liveness import SECONDS, at_rest, callers, paused, running, until
from reference import make_random_model
from support import SMALL, MakePool, same

from enginepool import EnginePool, InvalidRequest, NoWeights, PoolClosed

GREEDY = {"temperature": 0, "ignore_eos": True}
PROMPTS = [[i + 1, 2 * i + 3, 200 - i] * (1 + i % 3) for i in range(12)]
MODES = ["drain", "retract", "abort", "in_place"]
SWAPS = 4


@pytest.fixture(scope="module")
def versions(
    model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """Version 0 is the session's model; odd versions are another, even ones the first again."""
    other = make_random_model(tmp_path_factory.mktemp("other"), "qwen3", seed=2)
    return [model_dir("qwen3"), other]


@pytest.fixture
def two(make_pool: MakePool, versions: list[Path]) -> Iterator[EnginePool]:
    pool = make_pool("qwen3", 2)
    pool.update_weights(versions[0], weight_version=0)
    yield pool
    pool.update_weights(versions[0], weight_version=0)


def swap_under_load(
    pool: EnginePool, versions: list[Path], mode: Any, count: int = SWAPS, **options: Any
) -> list[dict[str, Any]]:
    """Long requests; swaps follow each other as fast as they can while those run."""
    params = [{**GREEDY, "max_new_tokens": 60 + 10 * (i % 4)} for i in range(len(PROMPTS))]
    with callers(1) as executor:
        call = executor.submit(
            pool.generate_all, input_ids=PROMPTS, sampling_params=params, return_logprob=True
        )
        until(lambda: running(pool) >= 6)
        for number in range(1, count + 1):
            pool.update_weights(versions[number % 2], mode=mode, weight_version=number, **options)
        results = call.result(SECONDS)
    until(lambda: at_rest(pool))
    return results


def in_use(pool: EnginePool) -> int:
    """Bytes of live arrays, without those that other tests left to the garbage collector."""
    gc.collect()
    return pool.stats()["memory"]["sum"]["bytes_in_use"]


def assert_spans(results: list[dict[str, Any]]) -> None:
    """Spans cover the output without gap or overlap, in the order of the versions."""
    for result in results:
        spans = result["meta_info"]["weight_versions"]
        edges = [edge for start, end, _ in spans for edge in (start, end)]
        assert edges[0] == 0
        assert edges[-1] == len(result["output_ids"]) == result["meta_info"]["completion_tokens"]
        assert edges[1:-1:2] == edges[2::2]
        assert all(end > start for start, end, _ in spans)
        assert [v for *_, v in spans] == sorted({v for *_, v in spans})


def assert_each_span_is_its_versions(results: list[dict[str, Any]], versions: list[Path]) -> None:
    """Every token is the best one, given all before it, by the weights that its span names."""
    outputs = [result["output_ids"] for result in results]
    logits = [output_logits(path, PROMPTS, outputs) for path in versions]
    for index, result in enumerate(results):
        for start, end, version in result["meta_info"]["weight_versions"]:
            rows = logits[version % 2][index][start:end]
            chosen = rows[np.arange(end - start), outputs[index][start:end]]
            assert (rows.max(axis=-1) - chosen).max() < 1e-3


@pytest.mark.parametrize("mode", MODES)
def test_modes(two: EnginePool, versions: list[Path], mode: str) -> None:
    """Every request ends; spans are exact; with "drain" and "retract" each token is the one that
    its version gives, with "drain" no output mixes two, and with "retract" none that runs misses
    a version: each swap lets every request gain a token."""
    results = swap_under_load(two, versions, mode)
    kept = [result for result in results if result["output_ids"]]
    assert_spans(kept)
    reasons = {result["meta_info"]["finish_reason"]["type"] for result in results}
    assert reasons <= ({"length", "abort"} if mode == "abort" else {"length"})
    mixed = [len(result["meta_info"]["weight_versions"]) for result in kept]
    if mode == "drain":
        assert set(mixed) == {1}
    if mode in ("retract", "in_place"):
        assert max(mixed) > 2
        for result in results:
            seen = [version for *_, version in result["meta_info"]["weight_versions"]]
            assert seen == list(range(seen[0], seen[-1] + 1))
    if mode == "abort":
        assert "abort" in reasons
    if mode != "in_place":
        assert_each_span_is_its_versions(results, versions)


def test_rolling(two: EnginePool, versions: list[Path]) -> None:
    """One engine at a time: each output is of one version, and all engines end on the last."""
    results = swap_under_load(two, versions, "drain", 2, strategy="rolling")
    assert_spans(results)
    assert {len(result["meta_info"]["weight_versions"]) for result in results} == {1}
    assert_each_span_is_its_versions(results, versions)
    assert two.checksum()


def test_prefix_cache_is_of_its_version(two: EnginePool, versions: list[Path]) -> None:
    """A prompt whose prefix is cached gives what the new weights give, in every mode."""
    prompt = list(range(1, 120))
    for number, mode in enumerate(MODES, 1):
        for _ in range(2):
            two.generate(input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": 4})
        two.update_weights(versions[number % 2], mode=mode)
        result = two.generate(input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": 4})
        assert result["meta_info"]["cached_tokens"] == 0
        rows = output_logits(versions[number % 2], [prompt], [result["output_ids"]])[0]
        chosen = rows[np.arange(4), result["output_ids"]]
        assert (rows.max(axis=-1) - chosen).max() < 1e-3


def test_drain_of_a_paused_pool_is_refused(two: EnginePool, versions: list[Path]) -> None:
    """Outputs that do not run cannot be waited for; the error says what to do, and the pool goes
    on afterwards as if nothing had been asked."""
    with callers(1) as executor:
        call = executor.submit(
            two.generate, input_ids=[5, 6], sampling_params={**GREEDY, "max_new_tokens": 40}
        )
        until(lambda: running(two) == 1)
        with paused(two):
            with pytest.raises(InvalidRequest, match="continue_generation"):
                two.update_weights(versions[1])
            two.update_weights(versions[1], mode="in_place", weight_version=1)
            assert not call.done()
        assert len(call.result(SECONDS)["output_ids"]) == 40
    assert two.stats()["weight_version"] == 1


def test_options(two: EnginePool, versions: list[Path]) -> None:
    for options in (
        {"mode": "flush"},
        {"strategy": "blue"},
        {"staging": "disk"},
        {"weight_version": 1.5},
        {"weight_version": True},
        {"strategy": "rolling", "mode": "retract"},
        {"free_kv": True, "mode": "in_place"},
    ):
        with pytest.raises(InvalidRequest):
            two.update_weights(versions[1], **options)
    assert two.stats()["weight_version"] == 0


def test_kv_cache(two: EnginePool, versions: list[Path]) -> None:
    """Dropping frees what it reports and rebuilding takes it again; requests wait meanwhile, and
    what they give is what they give without."""
    params = {**GREEDY, "max_new_tokens": 50}
    expected = two.generate_all(input_ids=PROMPTS, sampling_params=params, return_logprob=True)
    before = in_use(two)
    freed = two.release_memory_occupation()
    assert in_use(two) == before - freed
    assert two.resume_memory_occupation() == freed
    assert in_use(two) == before
    with callers(1) as executor:
        call = executor.submit(
            two.generate_all, input_ids=PROMPTS, sampling_params=params, return_logprob=True
        )
        until(lambda: running(two) >= 6)
        dropped = two.release_memory_occupation()
        assert two.release_memory_occupation() == 0
        two.update_weights(versions[0], weight_version=0)
        assert not call.done()
        assert two.resume_memory_occupation() == dropped
        same(call.result(SECONDS), expected)
    report = two.update_weights(versions[0], free_kv=True, weight_version=0)
    assert report.kv_bytes == dropped
    with pytest.raises(InvalidRequest, match="release_weights"):
        two.release_memory_occupation(("weights",))


def test_release_weights(two: EnginePool, versions: list[Path]) -> None:
    """The memory is given back, running requests wait, new calls are refused until an update."""
    before = in_use(two)
    released = two.release_weights()
    assert in_use(two) == before - released
    two.update_weights(versions[0], weight_version=0)
    assert in_use(two) == before
    with callers(1) as executor:
        call = executor.submit(
            two.generate_all,
            input_ids=PROMPTS,
            sampling_params={**GREEDY, "max_new_tokens": 60},
            return_logprob=True,
        )
        until(lambda: running(two) >= 6)
        assert two.release_weights() == released
        with pytest.raises(NoWeights, match="update_weights"):
            two.generate(input_ids=[1])
        with pytest.raises(NoWeights):
            two.checksum()
        assert not call.done()
        two.update_weights(versions[1], weight_version=1)
        results = call.result(SECONDS)
    assert_spans(results)
    assert_each_span_is_its_versions(results, versions)


def test_closing_ends_a_swap_that_waits(make_pool: MakePool, versions: list[Path]) -> None:
    """`close` while a swap waits for running outputs: the swap raises PoolClosed."""
    pool = EnginePool(str(versions[0]), devices=1, warmup="none", **SMALL).open()
    with callers(2) as executor:
        call = executor.submit(
            pool.generate, input_ids=[5], sampling_params={**GREEDY, "max_new_tokens": 400}
        )
        until(lambda: running(pool) == 1)
        swap = executor.submit(pool.update_weights, versions[1])
        until(lambda: pool.stats()["engines"][0]["state"] == "draining")
        closing = threading.Thread(target=pool.close)
        closing.start()
        for future in (call, swap):
            with pytest.raises(PoolClosed):
                future.result(SECONDS)
        closing.join(SECONDS)
        assert not closing.is_alive()


def test_a_pause_waits_for_a_swap(two: EnginePool, versions: list[Path]) -> None:
    """An output that a swap waits for is not stopped by a pause; that comes after the swap."""
    with callers(3) as executor:
        call = executor.submit(
            two.generate, input_ids=[5, 6], sampling_params={**GREEDY, "max_new_tokens": 200}
        )
        until(lambda: running(two) == 1)
        swap = executor.submit(two.update_weights, versions[1], weight_version=1)
        until(lambda: "draining" in {e["state"] for e in two.stats()["engines"]})
        pause = executor.submit(two.pause_generation, "in_place")
        assert call.result(SECONDS)["meta_info"]["weight_versions"] == [[0, 200, 0]]
        assert swap.result(SECONDS).weight_version == 1
        pause.result(SECONDS)
        two.continue_generation()
    assert two.generate(input_ids=[5], sampling_params=GREEDY)["meta_info"]["weight_version"] == 1
