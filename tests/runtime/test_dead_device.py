"""A device that raises at every call takes only its own engine out."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from enginepool import EnginePool, PoolFailed, WeightUpdateFailed
from enginepool.engine.build import Assembly
from tests.support import faults
from tests.support.liveness import SECONDS, callers, running, until
from tests.support.pools import SMALL, same

PROMPTS = [[65 + i, 90 - i, 40 + i] for i in range(8)]
GREEDY = {"temperature": 0.0, "max_new_tokens": 200, "ignore_eos": True}
REASON = r"device {} does not answer any more .*ILLEGAL_ADDRESS.* only a new process"


@pytest.fixture
def dead() -> Iterator[set[int]]:
    with faults.dead_devices() as devices:
        yield devices


@pytest.fixture
def pool(model_dir: Callable[[str], Path], dead: set[int]) -> Iterator[EnginePool]:
    """Two engines with unlimited restarts."""
    options = SMALL | {"warmup": "none", "max_restarts": 1000}
    with EnginePool(str(model_dir("qwen3")), devices=2, **options) as pool:
        yield pool


def ask(pool: EnginePool) -> list[dict[str, Any]]:
    return pool.generate_all(input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True)


def events(pool: EnginePool) -> list[tuple[str, int]]:
    return [(event["event"], event["engine"]) for event in pool.events()]


def test_the_others_go_on(
    pool: EnginePool, dead: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every prompt is answered. The engine is not rebuilt, and the reason is given."""
    expected = ask(pool)
    made: list[object] = []
    monkeypatch.setattr(Assembly, "rebuild", lambda *_, **__: made.append(1))
    with callers() as executor:
        asked = executor.submit(ask, pool)
        until(lambda: running(pool) == 8)
        dead.add(1)
        same(asked.result(SECONDS), expected)
    until(lambda: ("engine_stays_out", 1) in events(pool))
    same(ask(pool), expected)
    [_, broken] = pool.stats()["engines"]
    assert broken["state"] == "quarantined"
    with pytest.raises(PoolFailed, match=REASON.format(1)):
        pool.engines[1].generate(input_ids=PROMPTS[0])
    found = events(pool)
    assert [event for event, engine in found if engine == 1][:1] == ["engine_quarantined"]
    assert found.count(("engine_stays_out", 1)) == 1
    assert not [event for event, engine in found if engine == 0]
    assert not made
    pool.update_weights(pool.config.model)  # on the engine that is left


def test_all_engines_on_dead_devices(pool: EnginePool, dead: set[int]) -> None:
    """Every call gets an error with the reason, and the pool closes."""
    calls: list[Callable[[], Any]] = [
        lambda: ask(pool),
        lambda: list(pool.stream(input_ids=PROMPTS[0], sampling_params=GREEDY)),
        lambda: pool.score(input_ids=PROMPTS, continuation_ids=[[1]] * len(PROMPTS)),
        lambda: pool.engines[1].generate(input_ids=PROMPTS[0], sampling_params=GREEDY),
    ]
    with callers() as executor:
        asked = [executor.submit(call) for call in calls[:1]]
        until(lambda: running(pool) == 8)
        dead.update({0, 1})
        asked += [executor.submit(call) for call in calls[1:]]
        for one in asked:
            with pytest.raises(PoolFailed, match=REASON.format("[01]")):
                one.result(SECONDS)
    calls += [pool.checksum, lambda: pool.update_weights(pool.config.model)]
    for call in [*calls, pool.release_memory_occupation]:
        with pytest.raises(PoolFailed, match=REASON.format("[01]")):
            call()
    for harmless in (pool.flush_cache, pool.pause_generation, pool.continue_generation):
        harmless()
    assert [engine["state"] for engine in pool.stats()["engines"]] == ["quarantined"] * 2
    pool.close()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(pool.name)]


def test_while_nothing_runs(pool: EnginePool, dead: set[int]) -> None:
    """An update fails and names the device. The pool closes."""
    dead.update({0, 1})
    with pytest.raises(WeightUpdateFailed, match="ILLEGAL_ADDRESS"):
        pool.update_weights(pool.config.model)
    pool.close()
