"""Updates fail on one device. Every serving engine has the same version, and the error or the
report names the device."""

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from enginepool import EnginePool, InvalidWeights, NoWeights, WeightUpdateFailed
from enginepool.dispatch.dispatch import Dispatch
from enginepool.engine.channel import Channel
from enginepool.runtime import commit, update
from enginepool.runtime.quiesce import EngineGroup
from enginepool.weights.leaves import EngineLeaves
from tests.support.faults import (
    Fault,
    every_step,
    fail_once,
    hang_in_reset,
    hang_in_step,
    raise_in_commit,
    raise_in_step,
    scheduler_of,
)
from tests.support.layouts import PROMPTS, answers, leaves, serves
from tests.support.liveness import SECONDS, callers, running, until
from tests.support.marks import slow
from tests.support.pools import SMALL, MakePool, in_use, same

FULL = "RESOURCE_EXHAUSTED: out of memory"
FOR_EVER = range(5, 10**9)
LEAF = "model.layers.0.mlp.up_proj.weight"


@contextmanager
def full(device: int, placements: range) -> Iterator[None]:
    """Some placements of arrays on a device by this thread fail, as on a full device.

    The steps of an engine place arrays, too, on its own thread. Those succeed.
    """
    put, number, updating = jax.device_put, count(), threading.get_ident()

    def device_put(arrays: Any, where: Any = None, *args: Any, **options: Any) -> Any:
        if threading.get_ident() == updating:
            for place in where if isinstance(where, list) else [where]:
                devices = {one.id for one in getattr(place, "device_set", ())}
                if device in devices and next(number) in placements:
                    raise RuntimeError(FULL)
        return put(arrays, where, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_put", device_put)
        yield


def in_halves(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """In a narrower dtype, so that they are cast on the devices."""
    return {path: value.astype(np.float16) for path, value in params.items()}


@contextmanager
def refused(array: np.ndarray) -> Iterator[None]:
    """This array fits no device."""
    put = jax.device_put

    def device_put(arrays: Any, *args: Any, **options: Any) -> Any:
        if any(one is array for one in (arrays if isinstance(arrays, list) else [arrays])):
            raise RuntimeError(FULL)
        return put(arrays, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_put", device_put)
        yield


class Broken:
    """Replaces a Variable of the model. It cannot be written."""

    def set_value(self, value: Any) -> None:
        raise RuntimeError(FULL)


@contextmanager
def broken_commit(pool: EnginePool, engine: int, leaf: int) -> Iterator[None]:
    """Putting new weights in place on this engine fails at a leaf in the middle."""
    scheduler: Any = pool.engines[engine].scheduler_info["scheduler"]
    path = list(scheduler.leaves)[leaf]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(scheduler.leaves._variables, path, Broken())
        yield


def states(pool: EnginePool) -> list[str]:
    return [engine["state"] for engine in pool.stats()["engines"]]


def versions(pool: EnginePool) -> set[Any]:
    """The weight versions that the outputs of all engines name."""
    results = pool.generate_all(
        input_ids=[[5, 6]] * 16, sampling_params={"max_new_tokens": 2, "temperature": 0}
    )
    return {version for result in results for *_, version in result["meta_info"]["weight_versions"]}


@contextmanager
def unchanged(pool: EnginePool) -> Iterator[None]:
    """Weights, answers, version and memory are the same afterwards."""
    expected, checksum, memory = answers(pool), pool.checksum(), in_use(pool)
    yield
    assert pool.checksum() == checksum
    assert versions(pool) == {0} == {pool.stats()["weight_version"]}
    assert states(pool) == ["serving"] * len(pool.engines)
    assert in_use(pool) == memory
    same(answers(pool), expected)


@pytest.mark.parametrize("engine", [0, 2])
def test_staging(four: EnginePool, target: Callable[[str], Path], engine: int) -> None:
    """A device fills up while all engines serve. No engine changes."""
    with unchanged(four):
        with full(engine, FOR_EVER), pytest.raises(WeightUpdateFailed, match=FULL) as caught:
            four.update_weights(target("qwen3"))
        assert caught.value.engine_index == engine
        assert str(jax.devices()[engine]) in str(caught.value)
        assert caught.value.name in str(caught.value)
        del caught  # it refers to the staged arrays


@pytest.mark.parametrize("staging", ["double", "stream"])
def test_a_leaf_of_a_batch(four: EnginePool, target: Callable[[str], Path], staging: Any) -> None:
    """A leaf that cannot be placed is named, also in the middle of a batch. Nothing changes."""
    source = in_halves(leaves(target("qwen3")))
    with unchanged(four):
        with refused(source[LEAF]), pytest.raises(WeightUpdateFailed, match=FULL) as caught:
            four.update_weights(source, staging=staging)
        assert (caught.value.engine_index, caught.value.name) == (0, LEAF)
        assert LEAF in str(caught.value)
        del caught


@pytest.mark.parametrize("strategy", ["atomic", "rolling"])
def test_commit(four: EnginePool, target: Callable[[str], Path], strategy: Any) -> None:
    """One engine's new weights cannot be put in place after those of the others. All engines get
    the old ones back."""
    engine = 2 if strategy == "atomic" else 0
    with unchanged(four):
        with broken_commit(four, engine, 7), pytest.raises(WeightUpdateFailed) as caught:
            four.update_weights(target("qwen3"), strategy=strategy)
        assert FULL in str(caught.value)
        assert caught.value.engine_index == engine
        assert str(jax.devices()[engine]) in str(caught.value)
        del caught
    four.update_weights(target("qwen3"))
    serves(four, target("qwen3"))


def test_interrupted_commit(four: EnginePool, target: Callable[[str], Path]) -> None:
    """Control-C comes after engines have put new weights in place. They get the old ones back."""
    replace, collect = EngineLeaves.replace, EngineGroup.collect
    replaced: list[bool] = []

    def noting(leaves: EngineLeaves, *arrays: Any) -> Any:
        replaced.append(True)
        return replace(leaves, *arrays)

    def interrupted(engines: EngineGroup, futures: Any) -> dict[int, Any]:
        results = collect(engines, futures)
        if len(replaced) == 4:
            raise KeyboardInterrupt
        return results

    with unchanged(four), pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineLeaves, "replace", noting)
        patch.setattr(EngineGroup, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            four.update_weights(target("qwen3"))
        assert len(replaced) == 8


def test_interrupted_labels(
    four: EnginePool, target: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control-C comes when all engines have the new weights and one has their version. All get
    it."""
    put_in_place, run, jobs = update.commit, Channel.run, count()
    committed = threading.Event()

    def noting(*args: Any) -> Any:
        before = put_in_place(*args)
        committed.set()
        return before

    def interrupted(channel: Channel, job: Any) -> Any:
        if committed.is_set() and next(jobs) == 1:
            raise KeyboardInterrupt
        return run(channel, job)

    monkeypatch.setattr(update, "commit", noting)
    monkeypatch.setattr(Channel, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        four.update_weights(target("qwen3"), weight_version="new")
    assert versions(four) == {"new"} == {four.stats()["weight_version"]}
    serves(four, target("qwen3"))


def test_rolling_update_interrupted_twice(
    four: EnginePool, target: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control-C comes again and again while the update stops the second engine. Engines that serve
    have the new weights, and the next update brings them to the others."""
    quiesced = update.quiesced

    def interrupted(runtime: Any, workers: Any, mode: Any) -> Any:
        if workers[0].index == 1:
            raise KeyboardInterrupt
        return quiesced(runtime, workers, mode)

    with monkeypatch.context() as patch:
        patch.setattr(update, "quiesced", interrupted)
        with pytest.raises(KeyboardInterrupt):
            four.update_weights(target("qwen3"), weight_version="new", strategy="rolling")
    assert states(four) == ["serving", *["unloaded"] * 3]
    assert "KeyboardInterrupt" in four.stats()["engines"][3]["reason"]
    assert versions(four) == {"new"} == {four.stats()["weight_version"]}
    four.update_weights(target("qwen3"))
    assert states(four) == ["serving"] * 4
    serves(four, target("qwen3"))


def test_old_weights_that_cannot_be_put_back(
    llama: EnginePool, model_dir: Callable[[str], Path], target: Callable[[str], Path]
) -> None:
    """The first engine takes the new weights, the second does not, and then the first does not
    take its old ones. It gets them from the second."""
    raise_in_commit(llama, 0, at=2)
    raise_in_commit(llama, 1)
    with pytest.raises(WeightUpdateFailed, match=r"engine 1 .*does not take weights"):
        llama.update_weights(target("llama"))
    until(lambda: states(llama) == ["serving"] * 2)
    assert versions(llama) == {0}
    serves(llama, model_dir("llama"))


@pytest.mark.parametrize(
    "stop",
    [
        pytest.param(lambda pool, new: pool.update_weights(new, mode="abort"), id="abort"),
        pytest.param(lambda pool, new: pool.update_weights(new, mode="retract"), id="retract"),
        pytest.param(lambda pool, new: pool.pause_generation(mode="retract"), id="pause"),
        pytest.param(lambda pool, new: pool.flush_cache(), id="flush"),
    ],
)
def test_interrupted_stop(
    four: EnginePool,
    target: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    control_c: None,
    stop: Callable[[EnginePool, Path], Any],
) -> None:
    """Control-C comes while an engine gives its requests back. They go on, with the weights that
    they had."""
    long = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 60}
    expected = four.generate_all(input_ids=PROMPTS, sampling_params=long, return_logprob=True)
    retract, resume = Channel.retract, Dispatch.resume
    sent, left = threading.Event(), threading.Event()

    def interrupting(channel: Channel) -> Any:
        if channel.load() and not sent.is_set():
            sent.set()
            os.kill(os.getpid(), signal.SIGINT)
            left.wait(SECONDS)
        return retract(channel)

    def resuming(dispatch: Dispatch, requests: Any) -> None:
        resume(dispatch, requests)
        if threading.current_thread() is threading.main_thread():
            left.set()

    with callers(1) as executor:
        call = executor.submit(
            four.generate_all, input_ids=PROMPTS, sampling_params=long, return_logprob=True
        )
        until(lambda: running(four) == len(PROMPTS))
        monkeypatch.setattr(Channel, "retract", interrupting)
        monkeypatch.setattr(Dispatch, "resume", resuming)
        with pytest.raises(KeyboardInterrupt):
            stop(four, target("qwen3"))
        left.set()
        four.continue_generation()
        same(call.result(SECONDS), expected)
    assert sent.is_set()


@pytest.mark.parametrize("strategy", ["atomic", "rolling"])
def test_first_engine_of_a_stream(
    four: EnginePool, target: Callable[[str], Path], strategy: Any
) -> None:
    """Another engine gives it back the leaves that it has already dropped."""
    source = in_halves(leaves(target("qwen3")))
    with unchanged(four):
        with refused(source[LEAF]), pytest.raises(WeightUpdateFailed, match=FULL) as caught:
            four.update_weights(source, staging="stream", strategy=strategy)
        assert caught.value.engine_index == 0
        assert str(jax.devices()[0]) in str(caught.value)
        del caught


@contextmanager
def interrupted_stream(engine: int) -> Iterator[None]:
    """Control-C comes when this engine has some of its new leaves."""
    wait, batches = commit.wait, count()

    def interrupted(workers: Any, made: Any) -> None:
        wait(workers, made)
        if workers[0].index == engine and next(batches) == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "wait", interrupted)
        yield


def test_interrupted_stream(four: EnginePool, target: Callable[[str], Path]) -> None:
    """One engine has the new weights, another has some of them. Both get the old ones back from the
    engines after them."""
    with unchanged(four), interrupted_stream(1), pytest.raises(KeyboardInterrupt):
        four.update_weights(target("qwen3"), staging="stream")


def test_stream_that_is_interrupted_in_the_last_engine(
    llama: EnginePool, target: Callable[[str], Path]
) -> None:
    """No engine has all of the old weights. None serves before the next update."""
    with interrupted_stream(1), pytest.raises(KeyboardInterrupt):
        llama.update_weights(target("llama"), staging="stream")
    assert states(llama) == ["unloaded"] * 2
    with pytest.raises(NoWeights, match="KeyboardInterrupt"):
        answers(llama)
    llama.update_weights(target("llama"))
    serves(llama, target("llama"))


def test_interrupted_between_two_engines(
    four: EnginePool, target: Callable[[str], Path], control_c: None
) -> None:
    """Control-C in a rolling update, while the second engine drains. Neither it nor any later
    engine keeps the old weights, and its request is answered."""
    long = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 60}
    hang, channel = hang_in_step(four, 1, at=10), four.runtime.workers[1].channel

    def interrupt() -> None:
        until(lambda: four.stats()["weight_version"] == "new" and channel.has_jobs())
        os.kill(os.getpid(), signal.SIGINT)
        hang.set()

    with callers(2) as executor:
        call = executor.submit(four.engines[1].generate, input_ids=[5, 6], sampling_params=long)
        assert hang.begun.wait(SECONDS)
        sent = executor.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            four.update_weights(target("qwen3"), strategy="rolling", weight_version="new")
        sent.result(SECONDS)
        assert len(call.result(SECONDS)["output_ids"]) == 60
    assert states(four) == ["serving"] * 4
    assert versions(four) == {"new"} == {four.stats()["weight_version"]}
    serves(four, target("qwen3"))


def test_a_leaf_of_a_stream(four: EnginePool, target: Callable[[str], Path]) -> None:
    """The error names the leaf that cannot be put in place, and its engine, which gets the old
    weights back."""
    with unchanged(four):
        raise_in_commit(four, 0, times=2)  # and again for the single leaf
        with pytest.raises(WeightUpdateFailed, match="does not take weights") as caught:
            four.update_weights(leaves(target("qwen3")), staging="stream")
        assert caught.value.engine_index == 0
        assert caught.value.name in str(caught.value)
        del caught


def test_first_engine_of_a_stream_for_good(four: EnginePool, target: Callable[[str], Path]) -> None:
    """If not even the old leaves fit any more, that engine is out with the reason. The others
    continue with the old weights, and the next update brings all back."""
    expected = answers(four)
    with full(0, FOR_EVER), pytest.raises(WeightUpdateFailed, match=FULL):
        four.update_weights(leaves(target("qwen3")), staging="stream")
    assert states(four) == ["unloaded", *["serving"] * 3]
    assert FULL in four.stats()["engines"][0]["reason"]
    assert versions(four) == {0} == {four.stats()["weight_version"]}
    same(answers(four), expected)
    four.update_weights(target("qwen3"))
    assert states(four) == ["serving"] * 4
    serves(four, target("qwen3"))


def test_only_engine_of_a_stream(
    make_pool: MakePool, model_dir: Callable[[str], Path], target: Callable[[str], Path]
) -> None:
    """Without another engine the old weights are lost. Calls raise until the next update."""
    pool = make_pool("qwen3", 1)
    with full(0, FOR_EVER), pytest.raises(WeightUpdateFailed, match=FULL):
        pool.update_weights(leaves(target("qwen3")), staging="stream")
    with pytest.raises(NoWeights, match=FULL):
        answers(pool)
    pool.update_weights(model_dir("qwen3"), weight_version=0)
    serves(pool, model_dir("qwen3"))


@pytest.mark.parametrize(
    "options", [{"staging": "stream", "mode": "retract"}, {"strategy": "rolling"}], ids=str
)
def test_later_engine(
    four: EnginePool, target: Callable[[str], Path], options: dict[str, Any]
) -> None:
    """The others already have the new weights. This engine is out with the reason, its requests
    end on the others, and the next update brings it back."""
    params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 160}
    with callers(1) as executor:
        call = executor.submit(four.generate_all, input_ids=PROMPTS * 4, sampling_params=params)
        until(lambda: running(four) == 16)
        with full(2, FOR_EVER):
            report = four.update_weights(target("qwen3"), weight_version=1, **options)
        results = call.result(SECONDS)
    assert [len(result["output_ids"]) for result in results] == [160] * 16
    assert report.failed.keys() == {2}
    assert FULL in report.failed[2]
    assert str(jax.devices()[2]) in report.failed[2]
    assert [engine.engine_index for engine in report.engines] == [0, 1, 3]
    assert len({engine.fingerprint for engine in report.engines} | {report.staged}) == 1
    assert states(four) == ["serving", "serving", "unloaded", "serving"]
    assert four.stats()["engines"][2]["reason"] == report.failed[2]
    assert versions(four) == {1}
    name = re.search(r"putting (\S+) on", report.failed[2])[1]
    with pytest.raises(InvalidWeights, match="neither on engine 2 nor in the source"):
        four.update_weights({name: leaves(target("qwen3"))[name]}, strict=False)
    four.update_weights(target("qwen3"))
    assert states(four) == ["serving"] * 4
    serves(four, target("qwen3"))


@contextmanager
def failing_while_it_drains(pool: EnginePool, engine: int) -> Iterator[None]:
    """This engine's first step in a drain raises."""
    worker, failed = pool.runtime.workers[engine], threading.Event()

    def change(step: Callable[..., Any]) -> Callable[..., Any]:
        def failing_once(*args: Any, **kwargs: Any) -> Any:
            if worker.condition.draining and not failed.is_set():
                failed.set()
                raise Fault("this device is gone")
            return step(*args, **kwargs)

        return failing_once

    undo = every_step(scheduler_of(pool, engine), change)
    try:
        yield
        assert failed.is_set()
    finally:
        undo()


@pytest.mark.parametrize("options", [{}, *slow({"staging": "stream"}, {"free_kv": True})], ids=str)
def test_the_engine_that_converts_fails_meanwhile(
    llama: EnginePool, target: Callable[[str], Path], options: dict[str, Any]
) -> None:
    """The others get their weights on their own devices, its requests end there, and it comes
    back with the same weights."""
    params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 160}
    with callers(1) as executor:
        call = executor.submit(llama.generate_all, input_ids=PROMPTS * 4, sampling_params=params)
        until(lambda: running(llama) == 8)
        with failing_while_it_drains(llama, 0):
            report = llama.update_weights(target("llama"), **options)
        results = call.result(SECONDS)
    assert [len(result["output_ids"]) for result in results] == [160] * len(results)
    assert [one.engine_index for one in report.engines] == [1]
    until(lambda: states(llama) == ["serving"] * 2)
    for index in range(2):
        weights = scheduler_of(llama, index).leaves
        assert set().union(*(leaf.devices() for leaf in weights.values())) == {jax.devices()[index]}
    serves(llama, target("llama"))


def test_the_first_engine_of_a_rolling_update_stays_out(
    model_dir: Callable[[str], Path], target: Callable[[str], Path]
) -> None:
    """The error names it. The other engine serves on with its weights."""
    params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 60}
    options = {"devices": 2, "warmup": "none", "restart": False}
    with EnginePool(str(model_dir("llama")), **options, **SMALL) as pool, callers(1) as executor:
        call = executor.submit(pool.generate_all, input_ids=PROMPTS * 2, sampling_params=params)
        until(lambda: running(pool) == 8)
        error = pytest.raises(WeightUpdateFailed, match="engine 0: Fault")
        with failing_while_it_drains(pool, 0), error as caught:
            pool.update_weights(target("llama"), strategy="rolling")
        assert caught.value.engine_index == 0
        assert [len(result["output_ids"]) for result in call.result(SECONDS)] == [60] * 8
        assert states(pool) == ["quarantined", "serving"]
        assert versions(pool) == {0}


def test_the_first_engine_of_a_rolling_update_fails_with_its_new_weights(
    llama: EnginePool, target: Callable[[str], Path]
) -> None:
    """Its KV cache cannot be allocated again. The other engine gets the new weights, too, and so
    both serve the same version when the first one is back."""
    fail_once(scheduler_of(llama, 0).kv_cache, "rebuild")
    report = llama.update_weights(target("llama"), strategy="rolling", free_kv=True)
    assert report.failed.keys() == {0}
    assert "KV cache" in report.failed[0]
    assert [one.engine_index for one in report.engines] == [1]
    until(lambda: states(llama) == ["serving"] * 2)
    serves(llama, target("llama"))
    assert versions(llama) == {report.weight_version}


def test_the_only_engine_of_a_rolling_update_fails_with_its_new_weights(
    make_pool: MakePool, model_dir: Callable[[str], Path], target: Callable[[str], Path]
) -> None:
    """No other engine can have them, so the update raises. The engine comes back with them."""
    pool = make_pool("qwen3", 1)
    fail_once(scheduler_of(pool, 0).kv_cache, "rebuild")
    with pytest.raises(WeightUpdateFailed, match="KV cache"):
        pool.update_weights(target("qwen3"), strategy="rolling", free_kv=True)
    until(lambda: states(pool) == ["serving"])
    serves(pool, target("qwen3"))
    pool.update_weights(model_dir("qwen3"), weight_version=0)


def test_one_engine_comes_back_while_the_other_is_out(
    llama: EnginePool, target: Callable[[str], Path]
) -> None:
    """The second engine fails right after the update that the first one missed. It has the new
    weights all the same, and both serve."""
    params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 160}
    resets = [hang_in_reset(llama, index) for index in range(2)]
    with callers(1) as executor:
        call = executor.submit(llama.generate_all, input_ids=PROMPTS * 4, sampling_params=params)
        try:
            until(lambda: running(llama) == 8)
            with failing_while_it_drains(llama, 0):
                llama.update_weights(target("llama"))
            raise_in_step(llama, 1)
            until(lambda: states(llama) == ["resetting"] * 2)
            resets[0].set()
            until(lambda: states(llama)[0] != "resetting")
            assert states(llama) == ["serving", "resetting"]
        finally:
            for reset in resets:
                reset.set()
        results = call.result(SECONDS)
    assert [len(result["output_ids"]) for result in results] == [160] * len(results)
    until(lambda: states(llama) == ["serving"] * 2)
    serves(llama, target("llama"))
