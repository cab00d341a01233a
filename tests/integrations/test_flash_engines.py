"""Two engines on the TPU's attention kernel get new weights and lose their KV caches.

Only one of them runs a step at a time: see `_one_step_at_a_time` in tests/support/interpreter.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jax._src.pallas.mosaic.interpret.shared_memory import SharedMemory

from enginepool import EnginePool
from tests.integrations.conftest import GREEDY, OpenFlash, ids, under_way
from tests.support import faults
from tests.support.forced import assert_greedy
from tests.support.liveness import at_rest, until
from tests.support.pools import compilations
from tests.support.reference import make_random_model
from tests.support.spans import assert_each_span_is_its_versions, assert_spans

PROMPTS = [ids(n) for n in (20, 3, 66, 16)]
PARAMS = GREEDY | {"max_new_tokens": 10}


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [
        make_random_model(
            tmp_path_factory.mktemp("version"), "qwen3", seed, num_layers=1, num_heads=4
        )
        for seed in (1, 2)
    ]


@pytest.fixture(scope="module")
def opened(open_flash: OpenFlash, versions: list[Path]) -> Iterator[EnginePool]:
    with open_flash(versions[0], devices=2) as pool:
        yield pool


@pytest.fixture
def pool(opened: EnginePool, versions: list[Path]) -> Iterator[EnginePool]:
    """The pool with version 0 and empty prefix caches."""
    opened.update_weights(versions[0], weight_version=0)
    opened.flush_cache()
    yield opened
    until(lambda: at_rest(opened))


def ask(pool: EnginePool) -> list[dict[str, Any]]:
    return pool.generate_all(None, PARAMS, input_ids=PROMPTS, return_logprob=True)


def test_both_answer(pool: EnginePool, versions: list[Path]):
    with compilations() as compiled:
        results = ask(pool)
    assert not compiled
    assert {result["meta_info"]["engine_index"] for result in results} == {0, 1}
    assert assert_greedy(versions[0], PROMPTS, results) > 35


def test_a_swap_while_they_answer(pool: EnginePool, versions: list[Path]):
    """Requests go back to the queue and continue under the new weights. Every token is of the
    weights that its span names, no old prefix is found again, and no step is compiled again."""
    with under_way(pool, PROMPTS, PARAMS) as results:
        pool.update_weights(versions[1], mode="retract", weight_version=1)
    assert_spans(results)
    assert_each_span_is_its_versions(PROMPTS, results, versions)
    assert any(len(result["meta_info"]["weight_versions"]) == 2 for result in results)
    with compilations() as compiled:
        again = ask(pool)
    assert not compiled
    assert {result["meta_info"]["weight_version"] for result in again} == {1}
    assert assert_greedy(versions[1], PROMPTS, again) > 35


@pytest.mark.slow
def test_a_swap_leaf_by_leaf_without_kv_caches(pool: EnginePool, versions: list[Path]):
    """As on a chip that cannot hold a second weight set."""
    ask(pool)
    pool.update_weights(versions[1], staging="stream", free_kv=True, weight_version=1)
    results = ask(pool)
    assert {result["meta_info"]["cached_tokens"] for result in results} == {0}
    assert assert_greedy(versions[1], PROMPTS, results) > 35


def test_kv_caches_lost_with_a_step(pool: EnginePool, versions: list[Path]):
    """A step that fails takes its engine's KV buffers with it. The engine gets new ones, and all
    prompts are answered."""
    before = len(pool.events())
    faults.raise_after_step(pool, 0, at=4)
    faults.delete_kv_cache(pool, 1)
    results = ask(pool)
    until(lambda: [engine["state"] for engine in pool.stats()["engines"]] == ["serving"] * 2)
    failed = [e for e in pool.events()[before:] if e["event"] == "engine_quarantined"]
    assert {event["engine"] for event in failed} == {0, 1}
    assert assert_greedy(versions[0], PROMPTS, results) > 35


@pytest.mark.slow
def test_a_kernel_that_fails_midway(pool: EnginePool, versions: list[Path]):
    """Its step has taken the KV cache and written half of it."""
    before = len(pool.events())

    def wrong(*_: Any, **__: Any) -> Any:
        raise faults.Fault("a copy failed")

    faults.once([(SharedMemory, "store_buffer_content")], 200, wrong)
    results = ask(pool)
    until(lambda: [engine["state"] for engine in pool.stats()["engines"]] == ["serving"] * 2)
    failed = [e for e in pool.events()[before:] if e["event"] == "engine_quarantined"]
    assert ["a copy failed" in event["reason"] for event in failed] == [True]
    assert assert_greedy(versions[0], PROMPTS, results) > 35
