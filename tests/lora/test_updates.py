"""New versions of adapters under load, and more adapters than slots."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from enginepool import EnginePool, InvalidRequest, StaleWeights, WeightUpdateFailed
from enginepool.engine.build import Assembly
from enginepool.lora.adapter import Adapters
from tests.engine.test_joins import Order
from tests.lora.conftest import World
from tests.lora.test_exact import GREEDY, PROMPTS, check, load
from tests.support.adapters import agrees, config, ids_of
from tests.support.faults import Fault, hang_in_score, raise_in_reset, raise_in_step
from tests.support.forced import output_logits
from tests.support.liveness import (
    SECONDS,
    at_rest,
    callers,
    let_go,
    paused,
    running,
    until,
    waiting,
)
from tests.support.marks import steady_decode

LONG = GREEDY | {"max_new_tokens": 40}
MODES = ["drain", "retract", "abort", "in_place"]
NAMES: list[str | None] = ["x", None, "x", "x", None, "x"]


def check_spans(world: World, of: dict[int, str], prompts: Any, results: Any) -> None:
    """Every token is the best one after those before it, by the version that its span names."""
    outputs = [result["output_ids"] for result in results]
    logits = {
        name: output_logits(world.merged[name], prompts, outputs) for name in (None, *of.values())
    }
    for index, result in enumerate(results):
        meta = result["meta_info"]
        spans = meta.get("lora_versions") or [[0, len(outputs[index]), None]]
        assert spans[0][0] == 0
        assert spans[-1][1] == len(outputs[index])
        for start, end, version in spans:
            rows = logits[of.get(version)][index][start:end]
            chosen = rows[np.arange(end - start), outputs[index][start:end]]
            assert (rows.max(axis=-1) - chosen).max() < 1e-3, (index, spans)


def ask(pool: EnginePool, threads: Any, names: Any = NAMES) -> Future[list[dict[str, Any]]]:
    return threads.submit(
        pool.generate_all,
        input_ids=PROMPTS,
        sampling_params=LONG,
        lora_path=names,
        return_logprob=True,
    )


@pytest.mark.parametrize("mode", MODES)
def test_hot_updates(mode: Any, adapted: EnginePool, world: World) -> None:
    """Twenty versions, alternately from two sets of arrays, while outputs run."""
    of = {0: "a"}
    adapted.load_lora_adapter("x", world.folders["a"], weight_version=0)
    results, calls = [], []
    with callers() as threads:
        for version in range(1, 21):
            if version % 5 == 1:
                calls.append(ask(adapted, threads))
            until(lambda: running(adapted) > 0 or all(call.done() for call in calls))
            of[version] = "ab"[version % 2]
            adapted.load_lora_adapter(
                "x", world.folders[of[version]], weight_version=version, mode=mode
            )
        for call in calls:
            results += call.result()
    prompts, names = PROMPTS * len(calls), NAMES * len(calls)
    for name, result in zip(names, results, strict=True):
        meta = result["meta_info"]
        assert (mode == "abort" and name) or meta["finish_reason"]["type"] == "length"
        assert mode not in ("drain", "abort") or len(meta.get("lora_versions", [])) < 2
    if mode != "in_place":  # in place, the KV cache is of both versions
        some = [i for i, result in enumerate(results) if result["output_ids"]]
        check_spans(world, of, [prompts[i] for i in some], [results[i] for i in some])
    until(lambda: at_rest(adapted))
    (after,) = adapted.generate_all(
        input_ids=[PROMPTS[0]], sampling_params=GREEDY, lora_path="x", return_logprob=True
    )
    check(world, [PROMPTS[0]], [of[20]], [after])


def test_a_version_of_numpy(adapted: EnginePool, world: World) -> None:
    """Results carry a plain number, which JSON has."""
    adapted.load_lora_adapter("x", world.folders["a"], weight_version=np.int64(3))
    (result,) = adapted.generate_all(
        input_ids=[PROMPTS[0]], sampling_params=GREEDY, lora_path="x", return_logprob=True
    )
    assert json.dumps(result["meta_info"]["lora_versions"]) == "[[0, 12, 3]]"


def test_in_place_changes_what_runs(adapted: EnginePool, world: World) -> None:
    adapted.load_lora_adapter("x", world.folders["a"], weight_version=1)
    with callers() as threads:
        with paused(adapted):
            call = ask(adapted, threads)
            until(lambda: waiting(adapted) == len(PROMPTS))
        until(lambda: running(adapted) > 0)
        adapted.load_lora_adapter("x", world.folders["b"], weight_version=2, mode="in_place")
        results = call.result()
    spans = [result["meta_info"].get("lora_versions") for result in results]
    assert {2} <= {version for each in spans if each for *_, version in each}
    (after,) = adapted.generate_all(
        input_ids=[PROMPTS[0]], sampling_params=GREEDY, lora_path="x", return_logprob=True
    )
    check(world, [PROMPTS[0]], ["b"], [after])


@pytest.mark.parametrize("mode", ["drain", "in_place"])
def test_a_device_that_fails_changes_nothing(
    mode: Any, adapted: EnginePool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted.load_lora_adapter("x", world.folders["a"], weight_version=1)
    slots: Any = adapted.runtime.workers[1].scheduler.adapters
    with callers() as threads:
        call = ask(adapted, threads)
        until(lambda: running(adapted) > 0)

        def fail(*_: Any) -> None:
            raise Fault("the device is gone")

        with monkeypatch.context() as patch:
            patch.setattr(slots, "_write_slot", fail)
            with pytest.raises(WeightUpdateFailed, match="engine 1"):
                adapted.load_lora_adapter("x", world.folders["b"], weight_version=2, mode=mode)
        results = call.result()
    until(lambda: all(e["state"] == "serving" for e in adapted.stats()["engines"]))
    for result in results:
        assert result["meta_info"].get("lora_versions", [[0, 40, 1]]) == [[0, 40, 1]]
    check(world, PROMPTS, [name and "a" for name in NAMES], results)
    assert adapted.stats()["lora_adapters"]["x"]["weight_version"] == 1


def test_a_prompt_that_is_being_scored_ends_too(adapted: EnginePool, world: World) -> None:
    """With mode="abort", as what is being sampled."""
    load(adapted, world, "a")
    hangs = [hang_in_score(adapted, index) for index in (0, 1)]
    score = partial(adapted.score, input_ids=ids_of(5, [300]), continuation_ids=[[5]])
    with callers(2) as threads:
        call = threads.submit(score, lora_path="a")
        until(lambda: any(hang.begun.is_set() for hang in hangs))
        channels = [w.channel for w in adapted.runtime.workers if w.channel.load()]
        pause = threads.submit(adapted.pause_generation, "in_place")
        until(lambda: all(channel.has_jobs() for channel in channels))
        let_go(hangs)
        pause.result(SECONDS)
        try:
            adapted.load_lora_adapter("a", world.folders["b"], mode="abort")
        finally:
            adapted.continue_generation()
        (result,) = call.result(SECONDS)
    assert result["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("mode", ["drain", "in_place"])
def test_staged(
    mode: Any, adapted: EnginePool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No effect is visible before the commit. A commit that fails can be tried again."""
    adapted.load_lora_adapter("x", world.folders["a"], weight_version=1)
    staged = adapted.stage_lora_adapter("x", world.folders["b"], weight_version=2)
    assert (staged.lora_name, staged.weight_version) == ("x", 2)
    slots: Any = adapted.runtime.workers[1].scheduler.adapters

    def fail(*_: Any) -> None:
        raise Fault("the device is gone")

    for name, failing in (("a", True), ("b", False)):
        with monkeypatch.context() as patch:
            if failing:
                patch.setattr(slots, "_write_slot", fail)
                with pytest.raises(WeightUpdateFailed):
                    staged.commit(mode)
            else:
                staged.commit(mode)
        until(lambda: all(e["state"] == "serving" for e in adapted.stats()["engines"]))
        results = adapted.generate_all(
            input_ids=PROMPTS, sampling_params=GREEDY, lora_path="x", return_logprob=True
        )
        check(world, PROMPTS, [name] * len(PROMPTS), results)
    with pytest.raises(StaleWeights, match="version 2"):
        staged.commit()
    gone = adapted.stage_lora_adapter("y", world.folders["b"])
    gone.discard()
    with pytest.raises(StaleWeights):
        gone.commit()


def test_unload_while_it_is_in_use(adapted: EnginePool, world: World) -> None:
    """Earlier requests finish with it, also waiting ones."""
    load(adapted, world, "a")
    with callers() as threads:
        with paused(adapted):
            call = ask(adapted, threads, "a")
            until(lambda: waiting(adapted) == len(PROMPTS))
            adapted.unload_lora_adapter("a")
        with pytest.raises(InvalidRequest, match="no such adapter"):
            adapted.generate(input_ids=PROMPTS[0], lora_path="a")
        load(adapted, world, "b")
        check(world, PROMPTS, ["a"] * len(PROMPTS), call.result())


def test_more_adapters_than_slots(adapted: EnginePool, world: World) -> None:
    load(adapted, world, "a", "b", "c", "d")
    names = [*"abcd", None] * 4
    prompts = ids_of(5, [4 + i % 9 for i in range(len(names))])
    results = adapted.generate_all(
        input_ids=prompts, sampling_params=GREEDY, lora_path=names, return_logprob=True
    )
    check(world, prompts, names, results)
    held = [w.scheduler.adapters.held() for w in adapted.runtime.workers]  # type: ignore[union-attr]
    assert all(len(each) == 2 for each in held)


def test_a_request_that_waits_for_a_slot_gets_one(adapted: EnginePool, world: World) -> None:
    """Requests of other adapters never end, and one for a third adapter still runs."""
    load(adapted, world, "a", "b", "c")
    stop = threading.Event()

    def keep_busy(name: str) -> int:
        count = 0
        while not stop.is_set():
            adapted.generate(input_ids=PROMPTS[0], sampling_params=LONG, lora_path=name)
            count += 1
        return count

    with callers(12) as threads:
        busy = [threads.submit(keep_busy, name) for name in "abababab"]
        until(lambda: running(adapted) >= 4)
        try:
            results = adapted.generate_all(
                input_ids=PROMPTS, sampling_params=GREEDY, lora_path="c", return_logprob=True
            )
        finally:
            stop.set()
        check(world, PROMPTS, ["c"] * len(PROMPTS), results)
        assert all(call.result() for call in busy)


@steady_decode
def test_a_slot_that_becomes_free_between_steps(
    adapted: EnginePool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that came while no slot was free gets it. It does not wait for the others."""
    load(adapted, world, "a", "b", "c")
    engine: Any = adapted.engines[0]
    late, params = PROMPTS[3], [GREEDY | {"max_new_tokens": count} for count in (400, 60, 60)]
    order = Order(adapted, late, monkeypatch)
    with callers(2) as threads:
        others = threads.submit(
            engine.generate,
            input_ids=PROMPTS[:3],
            sampling_params=params,
            lora_path=[None, "a", "b"],
        )
        assert order.reached.wait(SECONDS)
        call = threads.submit(
            engine.generate, input_ids=late, sampling_params=GREEDY, lora_path="c"
        )
        until(lambda: waiting(adapted) == 1)
        order.go_on.set()
        call.result(SECONDS)
        assert not others.done()
        others.result(SECONDS)


def test_most_that_are_loaded(
    adapted: EnginePool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapted.runtime.adapters, "most", 1)
    load(adapted, world, "a", "a")
    with pytest.raises(InvalidRequest, match="max_loaded_loras=1"):
        load(adapted, world, "b")


def test_arrays_may_be_donated_afterwards(adapted: EnginePool, world: World) -> None:
    arrays = {name: jax.numpy.asarray(value) for name, value in world.arrays["a"].items()}
    adapted.load_lora_adapter("x", arrays, config_dict=config(4))
    for array in arrays.values():
        array.delete()
    (result,) = adapted.generate_all(
        input_ids=[PROMPTS[0]], sampling_params=GREEDY, lora_path="x", return_logprob=True
    )
    assert agrees(result, world.expected("a", [PROMPTS[0]])[0])


@contextmanager
def rebuilt_meanwhile(
    pool: EnginePool, index: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """An engine fails when the load in the block has just begun. It is rebuilt after the block."""
    check_room, rebuild = Adapters.check_room, Assembly.rebuild
    begun, go_on, calls = threading.Event(), threading.Event(), list[Future[Any]]()

    def late(assembly: Assembly, *, dummy_weights: bool) -> None:
        assembly.take_apart()
        begun.set()
        assert go_on.wait(SECONDS)
        rebuild(assembly, dummy_weights=dummy_weights)

    with callers(1) as threads:

        def failing(adapters: Adapters, name: str) -> None:
            if not calls:
                raise_in_reset(pool, index)
                raise_in_step(pool, index)
                calls.append(threads.submit(pool.engines[index].generate, input_ids=PROMPTS[0]))
                assert begun.wait(SECONDS)
            check_room(adapters, name)

        try:
            with monkeypatch.context() as patch:
                patch.setattr(Assembly, "rebuild", late)
                patch.setattr(Adapters, "check_room", failing)
                yield
        finally:
            go_on.set()
        assert calls[0].result(SECONDS)["output_ids"]
    until(lambda: all(e["state"] == "serving" for e in pool.stats()["engines"]))


def test_the_first_engine_is_rebuilt_meanwhile(
    adapted: EnginePool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says so, and nothing is loaded."""
    with (
        rebuilt_meanwhile(adapted, 0, monkeypatch),
        pytest.raises(WeightUpdateFailed, match=r"engine 0: .*try again"),
    ):
        load(adapted, world, "a")
    assert adapted.stats()["lora_adapters"] == {}


def test_another_engine_is_rebuilt_meanwhile(
    adapted: EnginePool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter is loaded, and the engine has it when it comes back."""
    with rebuilt_meanwhile(adapted, 1, monkeypatch):
        assert adapted.load_lora_adapter("a", world.folders["a"]).engines == 1
    result = adapted.engines[1].generate(
        None, GREEDY, input_ids=PROMPTS[0], lora_path="a", return_logprob=True
    )
    assert agrees(result, world.expected("a", [PROMPTS[0]])[0])
