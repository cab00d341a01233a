"""Swaps under load lose no output, and every token counts for the weights that made it."""

import threading
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec

from enginepool import EnginePool, InvalidRequest, NoWeights
from enginepool.runtime import weight_inspection
from tests.support.faults import hang_in_commit, hang_in_step, scheduler_of
from tests.support.forced import output_logits
from tests.support.layouts import leaves, placed
from tests.support.liveness import (
    SECONDS,
    at_rest,
    callers,
    paused,
    running,
    until,
    waiting,
)
from tests.support.pools import MakePool, in_use, same
from tests.support.spans import assert_each_span_is_its_versions, assert_spans

GREEDY = {"temperature": 0, "ignore_eos": True}
PROMPTS = [[i + 1, 2 * i + 3, 200 - i] * (1 + i % 3) for i in range(12)]
MODES = ["drain", "retract", "abort", "in_place"]
SWAPS = 5
IN_FLIGHT = 48
STEPS = 16  # of four engines, between two swaps: an output of 60 tokens sees several
LENGTHS = (6, 10, 14, 60)


def steps(pool: EnginePool) -> int:
    return sum(engine["steps"] for engine in pool.stats()["engines"])


@pytest.fixture
def versions(model_dir: Callable[[str], Path], target: Callable[[str], Path]) -> list[Path]:
    """Even versions are the first checkpoint, odd ones the second."""
    return [model_dir("qwen3"), target("qwen3")]


@pytest.fixture
def micro(four: EnginePool) -> EnginePool:
    """Four engines with version 0."""
    return four


def swap_under_load(
    pool: EnginePool, versions: list[Path], mode: Any, swaps: int, in_flight: int, **options: Any
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Swap weights this often, each swap some steps after the last one returned, with this many
    requests in flight.

    Returns:
        The prompts of all requests, and their results.
    """
    over = threading.Event()

    def call(number: int) -> list[tuple[list[int], dict[str, Any]]]:
        prompt = PROMPTS[number % len(PROMPTS)]
        params = {**GREEDY, "max_new_tokens": LENGTHS[number % 4]}
        made = []
        while not over.is_set():
            made.append((prompt, pool.generate(None, params, input_ids=prompt)))
        return made

    with callers(in_flight) as executor:
        try:
            calls = [executor.submit(call, number) for number in range(in_flight)]
            done = steps(pool)
            for number in range(1, swaps + 1):
                until(lambda done=done: steps(pool) >= done + STEPS)
                until(lambda: running(pool) + waiting(pool) > 0.75 * in_flight)
                pool.update_weights(
                    versions[number % 2], mode=mode, weight_version=number, **options
                )
                done = steps(pool)
            until(lambda: steps(pool) >= done + STEPS)
        finally:
            over.set()
        pairs = [pair for call in calls for pair in call.result(SECONDS)]
    until(lambda: at_rest(pool))
    return [prompt for prompt, _ in pairs], [result for _, result in pairs]


@pytest.mark.parametrize("mode", MODES)
def test_modes(micro: EnginePool, versions: list[Path], mode: str) -> None:
    """Every request ends, and spans are exact. Except with "in_place", each token is the one
    that its version gives. With "drain" no output mixes versions. With "retract" no running
    output misses a version, because each swap lets it gain a token."""
    prompts, results = swap_under_load(micro, versions, mode, SWAPS, IN_FLIGHT)
    kept = [result for result in results if result["output_ids"]]
    assert_spans(kept)
    reasons = {result["meta_info"]["finish_reason"]["type"] for result in results}
    assert reasons == ({"length", "abort"} if mode == "abort" else {"length"})
    seen = [[version for *_, version in result["meta_info"]["weight_versions"]] for result in kept]
    assert {version for versions_of_one in seen for version in versions_of_one} == set(
        range(SWAPS + 1)
    )
    if mode == "drain":
        assert {len(one) for one in seen} == {1}
    if mode in ("retract", "in_place"):
        assert max(len(one) for one in seen) > 2
        assert all(one == sorted(set(one)) for one in seen)
    if mode == "retract":  # a swap in place waits for no token
        assert all(one == list(range(one[0], one[-1] + 1)) for one in seen)
    if mode != "in_place":
        assert_each_span_is_its_versions(prompts, results, versions)


def test_retract_lets_every_request_gain_a_token(micro: EnginePool, versions: list[Path]) -> None:
    """Swaps come faster than engines can prefill retracted requests. Still no output misses a
    version."""
    prompts = [[i + 1] * 70 for i in range(8)]
    trees = [placed(leaves(path), PartitionSpec()) for path in versions]
    with callers(1) as executor:
        call = executor.submit(
            micro.generate_all, input_ids=prompts, sampling_params={**GREEDY, "max_new_tokens": 170}
        )
        until(lambda: running(micro) == 8)
        for number in range(1, 6):
            micro.update_weights(trees[number % 2], mode="retract", weight_version=number)
        results = call.result(SECONDS)
    assert_spans(results)
    for result in results:
        seen = [version for *_, version in result["meta_info"]["weight_versions"]]
        assert seen == [*range(len(seen))]
    assert len(seen) > 3
    assert_each_span_is_its_versions(prompts, results, versions)


def test_rolling(micro: EnginePool, versions: list[Path]) -> None:
    """One engine after the other. Each output is of one version, and all engines end with the
    last one."""
    prompts, results = swap_under_load(micro, versions, "drain", 2, 12, strategy="rolling")
    assert_spans(results)
    assert {len(result["meta_info"]["weight_versions"]) for result in results} == {1}
    assert_each_span_is_its_versions(prompts, results, versions)
    assert micro.checksum()


def test_prefix_cache_is_of_its_version(micro: EnginePool, versions: list[Path]) -> None:
    """A prompt whose prefix is cached gives what the new weights give, in every mode."""
    prompt = list(range(1, 120))
    for number, mode in enumerate(MODES, 1):
        for _ in range(2):
            micro.generate(input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": 4})
        micro.update_weights(versions[number % 2], mode=mode)
        result = micro.generate(input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": 4})
        assert result["meta_info"]["cached_tokens"] == 0
        rows = output_logits(versions[number % 2], [prompt], [result["output_ids"]])[0]
        chosen = rows[np.arange(4), result["output_ids"]]
        assert (rows.max(axis=-1) - chosen).max() < 1e-3


def test_drain_of_a_paused_pool_is_refused(micro: EnginePool, versions: list[Path]) -> None:
    """Outputs that do not run cannot be waited for. The error has the remedy, and the pool
    continues as if nothing had been asked."""
    with callers(1) as executor:
        call = executor.submit(
            micro.generate, input_ids=[5, 6], sampling_params={**GREEDY, "max_new_tokens": 400}
        )
        until(lambda: running(micro) == 1)
        with paused(micro):
            with pytest.raises(InvalidRequest, match="continue_generation"):
                micro.update_weights(versions[1])
            micro.update_weights(versions[1], mode="in_place", weight_version=1)
            assert not call.done()
        assert len(call.result(SECONDS)["output_ids"]) == 400
    assert micro.stats()["weight_version"] == 1


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_drain_of_a_paused_pool_is_refused_always(
    micro: EnginePool, versions: list[Path], mode: Any
) -> None:
    """Also if the pause came before the first token, in the middle of a long prompt. It is not
    refused if nothing has begun."""
    with paused(micro, mode), callers(1) as executor:
        call = executor.submit(micro.generate, input_ids=[5] * 400, sampling_params=GREEDY | {
            "max_new_tokens": 2})  # fmt: skip
        until(lambda: waiting(micro) == 1)
        micro.update_weights(versions[1])
        micro.continue_generation()
        call.result(SECONDS)
    channel = micro.runtime.workers[0].channel
    for chunk in range(1, 6):  # of seven chunks
        asked = {"input_ids": [chunk + 7] * 400, "sampling_params": {**GREEDY, "max_new_tokens": 2}}
        hang = hang_in_step(micro, 0, at=chunk)
        with callers(2) as executor:
            try:
                call = executor.submit(micro.engines[0].generate, **asked)
                assert hang.begun.wait(SECONDS)
                pause = executor.submit(micro.pause_generation, mode)
                until(channel.has_jobs)
            finally:
                hang.set()
            pause.result(SECONDS)
            with pytest.raises(InvalidRequest, match="continue_generation"):
                micro.update_weights(versions[0])
            assert not call.done()
            micro.continue_generation()
            assert len(call.result(SECONDS)["output_ids"]) == 2


def test_drain_beside_one_paused_engine(micro: EnginePool, versions: list[Path]) -> None:
    """A paused engine without requests does not block a drain. One with requests does."""
    long = {**GREEDY, "max_new_tokens": 300}
    engine = micro.engines[0]
    with callers(2) as executor:
        engine.pause_generation("in_place")
        call = executor.submit(micro.generate, input_ids=[5, 6], sampling_params=long)
        until(lambda: running(micro) == 1)
        report = micro.update_weights(versions[1])
        assert call.result(SECONDS)["meta_info"]["weight_version"] == 0
        engine.continue_generation()
        for mode in ("in_place", "retract"):
            call = executor.submit(engine.generate, input_ids=[5, 6], sampling_params=long)
            until(lambda: running(micro) == 1)
            engine.pause_generation(mode)
            with pytest.raises(InvalidRequest, match=r"engine 0 is paused.*continue_generation"):
                micro.update_weights(versions[0])
            engine.continue_generation()
            result = call.result(SECONDS)
            assert result["meta_info"]["weight_version"] == report.weight_version


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_changes_beside_one_paused_engine(
    micro: EnginePool, versions: list[Path], mode: Any
) -> None:
    """An output of the paused engine alone goes on after the pause, and nothing waits for it. Only
    a drain is refused, before any engine has changed."""
    long = {**GREEDY, "max_new_tokens": 300}
    engine = micro.engines[1]
    with callers(2) as executor:
        call = executor.submit(engine.generate, input_ids=[5, 6], sampling_params=long)
        until(lambda: running(micro) == 1)
        engine.pause_generation(mode)
        try:
            for number in (1, 2):
                executor.submit(
                    micro.update_weights,
                    versions[number % 2],
                    mode="retract",
                    weight_version=number,
                ).result(SECONDS)
            with pytest.raises(InvalidRequest, match="engine 1 is paused"):
                executor.submit(micro.update_weights, versions[1], strategy="rolling").result(
                    SECONDS
                )
            executor.submit(micro.release_memory_occupation).result(SECONDS)
            executor.submit(micro.resume_memory_occupation).result(SECONDS)
        except TimeoutError:
            micro.abort_request(abort_all=True)  # otherwise nothing ends
            raise
        assert micro.stats()["weight_version"] == 2
        assert micro.checksum()
        assert not call.done()
        engine.continue_generation()
        assert len(call.result(SECONDS)["output_ids"]) == 300


def test_drain_of_a_paused_pool_whose_outputs_were_aborted(
    micro: EnginePool, versions: list[Path]
) -> None:
    """They have ended, so there is nothing to wait for."""
    with callers(1) as executor:
        call = executor.submit(
            micro.generate, input_ids=[5, 6], sampling_params={**GREEDY, "max_new_tokens": 400}
        )
        until(lambda: running(micro) == 1)
        with paused(micro):
            micro.abort_request(abort_all=True)
            assert call.result(SECONDS)["meta_info"]["finish_reason"]["type"] == "abort"
            assert micro.stats()["running"] == running(micro) == 0
            micro.update_weights(versions[1], weight_version=1)
    assert micro.stats()["weight_version"] == 1
    until(lambda: at_rest(micro))


def test_options(micro: EnginePool, versions: list[Path]) -> None:
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
            micro.update_weights(versions[1], **options)
    assert micro.stats()["weight_version"] == 0


def test_kv_cache(micro: EnginePool, versions: list[Path]) -> None:
    """Dropping frees the bytes that it reports, and rebuilding takes them again. Requests wait
    meanwhile, and their outputs stay the same."""
    params = {**GREEDY, "max_new_tokens": 100}
    expected = micro.generate_all(input_ids=PROMPTS, sampling_params=params, return_logprob=True)
    before = in_use(micro)
    freed = micro.release_memory_occupation()
    assert in_use(micro) == before - freed
    assert micro.resume_memory_occupation() == freed
    assert in_use(micro) == before
    with callers(1) as executor:
        call = executor.submit(
            micro.generate_all, input_ids=PROMPTS, sampling_params=params, return_logprob=True
        )
        until(lambda: running(micro) >= 6)
        dropped = micro.release_memory_occupation()
        assert micro.release_memory_occupation() == 0
        with pytest.raises(InvalidRequest, match="resume_memory_occupation"):
            micro.update_weights(versions[0], weight_version=0)  # would mix versions
        micro.update_weights(versions[0], weight_version=0, mode="retract")
        assert not call.done()
        assert micro.resume_memory_occupation() == dropped
        same(call.result(SECONDS), expected)
    report = micro.update_weights(versions[0], free_kv=True, weight_version=0)
    assert report.kv_bytes == dropped
    micro.release_memory_occupation()
    report = micro.update_weights(versions[0], free_kv=True, weight_version=0)
    assert report.kv_bytes == 0
    assert micro.resume_memory_occupation() == dropped
    with pytest.raises(InvalidRequest, match="release_weights"):
        micro.release_memory_occupation(("weights",))


def test_release_weights(micro: EnginePool, versions: list[Path]) -> None:
    """The memory is freed, running requests wait, and new calls are refused until an update."""
    before = in_use(micro)
    released = micro.release_weights()
    assert in_use(micro) == before - released
    micro.update_weights(versions[0], weight_version=0)
    assert in_use(micro) == before
    with callers(1) as executor:
        call = executor.submit(
            micro.generate_all,
            input_ids=PROMPTS,
            sampling_params={**GREEDY, "max_new_tokens": 100},
            return_logprob=True,
        )
        until(lambda: running(micro) >= 6)
        assert micro.release_weights() == released
        with pytest.raises(NoWeights, match="update_weights"):
            micro.generate(input_ids=[1])
        with pytest.raises(NoWeights):
            micro.checksum()
        assert not call.done()
        micro.update_weights(versions[1], weight_version=1)
        results = call.result(SECONDS)
    assert_spans(results)
    assert_each_span_is_its_versions(PROMPTS, results, versions)


def test_a_checksum_waits_for_a_swap(micro: EnginePool, versions: list[Path]) -> None:
    """One engine has the new weights and another does not. That is no difference to report."""
    old = micro.checksum(), micro.quick_checksum()
    weights = scheduler_of(micro, 0).leaves
    path = next(iter(weights))
    first = weights[path]
    hang = hang_in_commit(micro, 1)
    with callers(3) as executor:
        try:
            swap = executor.submit(micro.update_weights, versions[1])
            assert hang.begun.wait(SECONDS)
            until(lambda: weights[path] is not first)
            sums = [executor.submit(read) for read in (micro.checksum, micro.quick_checksum)]
            wait(sums, timeout=1.0)  # they end only if they do not wait
        finally:
            hang.set()
        report = swap.result(SECONDS)
        assert sums[0].result(SECONDS) == report.staged == micro.checksum() != old[0]
        assert sums[1].result(SECONDS) == micro.quick_checksum() != old[1]


def test_a_tensor_is_read_while_it_is_replaced(micro: EnginePool, versions: list[Path]) -> None:
    """The reader waits for the new one."""
    name = "model.layers.0.mlp.up_proj.weight"
    old = micro.get_weights_by_name(name)
    dropped = hang_in_commit(micro, 0, at=2)  # after the first drop
    with callers(2) as executor:
        try:
            swap = executor.submit(micro.update_weights, versions[1], staging="stream")
            assert dropped.begun.wait(SECONDS)
            read = executor.submit(micro.get_weights_by_name, name)
            wait([read], timeout=0.5)  # it ends only if it does not wait
        finally:
            dropped.set()
        swap.result(SECONDS)
        assert read.result(SECONDS) == micro.get_weights_by_name(name) != old


def test_a_checksum_is_of_one_version(make_pool: MakePool, versions: list[Path]) -> None:
    """The only engine has its new leaves one after the other. All are there when the next is to be
    dropped, but some are old."""
    pool = make_pool("qwen3", 1)
    hang = hang_in_commit(pool, 0, at=3)
    with callers(2) as executor:
        try:
            swap = executor.submit(pool.update_weights, versions[1], staging="stream")
            assert hang.begun.wait(SECONDS)
            checksum = executor.submit(pool.checksum)
            wait([checksum], timeout=0.5)  # it ends only if it does not wait
        finally:
            hang.set()
        assert checksum.result(SECONDS) == swap.result(SECONDS).staged
    pool.update_weights(versions[0], weight_version=0)


def test_a_leaf_is_dropped_while_a_checksum_is_computed(
    micro: EnginePool, versions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checksum is that of the weights with which it began."""
    old = micro.checksum()
    begun, dropped = threading.Event(), hang_in_commit(micro, 0, at=2)  # after the first drop
    fingerprints = weight_inspection.fingerprints

    def late(sets: Any) -> list[str]:
        begun.set()
        assert dropped.begun.wait(SECONDS)
        return fingerprints(sets)

    with callers(2) as executor:
        try:
            with monkeypatch.context() as patch:
                patch.setattr(weight_inspection, "fingerprints", late)
                checksum = executor.submit(micro.checksum)
                assert begun.wait(SECONDS)
                swap = executor.submit(micro.update_weights, versions[1], staging="stream")
                assert checksum.result(SECONDS) == old
        finally:
            dropped.set()
        assert swap.result(SECONDS).staged == micro.checksum() != old


def test_requests_wait_for_their_engines_turn(micro: EnginePool, versions: list[Path]) -> None:
    """After a release a rolling update brings weights. A request of the last engine alone is not
    ended when the first engine has them."""
    with callers(1) as executor:
        call = executor.submit(
            micro.engines[3].generate,
            input_ids=[5, 6],
            sampling_params={**GREEDY, "max_new_tokens": 100},
        )
        until(lambda: running(micro) == 1)
        micro.release_weights()
        micro.update_weights(versions[1], strategy="rolling", weight_version=1)
        assert len(call.result(SECONDS)["output_ids"]) == 100
    assert micro.generate(input_ids=[1])["meta_info"]["weight_version"] == 1


def test_a_pause_waits_for_a_swap(micro: EnginePool, versions: list[Path]) -> None:
    """A pause does not stop an output that a swap waits for. It comes after the swap."""
    hang = hang_in_step(micro, 0, at=3)
    with callers(3) as executor:
        try:
            call = executor.submit(
                micro.engines[0].generate,
                input_ids=[5, 6],
                sampling_params={**GREEDY, "max_new_tokens": 400},
            )
            assert hang.begun.wait(SECONDS)
            swap = executor.submit(micro.update_weights, versions[1], weight_version=1)
            until(micro.runtime.workers[0].channel.has_jobs)  # it has staged
        finally:
            hang.set()
        until(lambda: "draining" in {e["state"] for e in micro.stats()["engines"]})
        executor.submit(micro.pause_generation, "in_place").result(SECONDS)
        assert {engine["state"] for engine in micro.stats()["engines"]} == {"paused"}
        micro.continue_generation()  # or a pause that came too early would stop the output
        assert call.result(SECONDS)["meta_info"]["weight_versions"] == [[0, 400, 0]]
        assert swap.result(SECONDS).weight_version == 1
    assert micro.generate(input_ids=[5], sampling_params=GREEDY)["meta_info"]["weight_version"] == 1
