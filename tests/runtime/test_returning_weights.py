"""Engines come back when weights are gone, or while weights change. Waiting callers get an
error, no engine serves weights of no version, and all engines serve the same version."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import jax
import pytest

from enginepool import (
    EnginePool,
    EnginePoolError,
    InvalidWeights,
    NoWeights,
    WeightUpdateFailed,
)
from enginepool.engine import build
from enginepool.engine.build import Assembly
from enginepool.engine.jobs import EngineBroken
from enginepool.engine.kv_cache import KVCache
from enginepool.engine.recovery import Recovery
from enginepool.engine.worker import EngineWorker
from enginepool.runtime import update
from enginepool.toy.files import read_checkpoint
from tests.support import faults
from tests.support.layouts import PROMPTS, leaves, serves
from tests.support.liveness import SECONDS, callers, paused, running, until
from tests.support.pools import SMALL, in_use
from tests.support.reference import make_random_model

GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("target"), "qwen3", seed=7)


@pytest.fixture(scope="module")
def opened(model_dir: Callable[[str], Path]) -> Iterator[EnginePool]:
    """Three engines."""
    options = {"devices": 3, "max_restarts": 1000}
    with EnginePool(str(model_dir("qwen3")), **options, **SMALL) as pool:
        yield pool


@pytest.fixture
def pool(opened: EnginePool, model_dir: Callable[[str], Path]) -> EnginePool:
    opened.update_weights(model_dir("qwen3"), weight_version=0)
    return opened


@pytest.fixture
def alone(model_dir: Callable[[str], Path]) -> Iterator[EnginePool]:
    """One engine."""
    options = {"devices": 1, "warmup": "none", "max_restarts": 1000}
    with EnginePool(str(model_dir("qwen3")), **options, **SMALL) as pool:
        yield pool


@pytest.fixture
def two(model_dir: Callable[[str], Path]) -> Iterator[EnginePool]:
    """Two engines."""
    options = {"devices": 2, "warmup": "none", "max_restarts": 1000}
    with EnginePool(str(model_dir("qwen3")), **options, **SMALL) as pool:
        yield pool


def states(pool: EnginePool) -> list[str]:
    return [engine["state"] for engine in pool.stats()["engines"]]


def test_the_only_engine_loses_its_weights(
    alone: EnginePool, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight of an update is deleted, a rebuild fails, and the next one succeeds without
    weights. The waiting call raises. An update of a part is refused, and one of a whole set
    works."""
    alone.update_weights(target)
    rebuild, attempts = Assembly.rebuild, []

    def failing(self: Assembly, *, dummy_weights: bool) -> None:
        attempts.append(dummy_weights)
        if len(attempts) == 1:
            self.take_apart()
            raise faults.Fault("no memory")
        rebuild(self, dummy_weights=dummy_weights)

    monkeypatch.setattr(Assembly, "rebuild", failing)
    faults.delete_leaf(alone, 0)
    faults.raise_in_reset(alone, 0)
    faults.raise_in_step(alone, 0)
    with callers(1) as executor:
        call = executor.submit(alone.generate, input_ids=PROMPTS[0], sampling_params=GREEDY)
        with pytest.raises(NoWeights, match="weights are gone"):
            call.result(SECONDS)
    assert attempts == [True, True]  # the checkpoint's weights are not the pool's current ones
    assert states(alone) == ["unloaded"]
    assert "weights are gone" in alone.stats()["engines"][0]["reason"]
    until(lambda: alone.events()[-1]["event"] == "engine_recovered")  # after the waiting call
    assert "engine_unloaded" in [event["event"] for event in alone.events()]
    part = dict([next(iter(leaves(target).items()))])
    with pytest.raises(InvalidWeights, match="neither on engine 0 nor in the source"):
        alone.update_weights(part, strict=False)
    alone.update_weights(target)
    serves(alone, target)


def test_weights_are_donated_while_a_step_hangs(pool: EnginePool, target: Path) -> None:
    """Its requests are out when the step returns, so there is nothing to unload. The engine
    comes back with another engine's weights."""
    first = jax.devices()[0]
    source = {path: jax.device_put(leaf, first) for path, leaf in leaves(target).items()}
    report = pool.update_weights(source)
    assert report.engines[0].shared == len(source)
    let_go = faults.hang_in_step(pool, 0)
    with callers(1) as executor:
        engine = pool.engines[0]
        call = executor.submit(engine.generate, input_ids=PROMPTS[0], sampling_params=GREEDY)
        faults.abandon(pool, let_go, 0)
        with pytest.raises(EnginePoolError, match=r"engine 0 .* is abandoned"):
            call.result(SECONDS)
    assert states(pool)[0] == "abandoned"
    for array in source.values():
        array.delete()
    let_go.set()
    until(lambda: states(pool) == ["serving"] * 3)
    serves(pool, target)


def test_a_paused_sibling_whose_weights_were_donated(pool: EnginePool, target: Path) -> None:
    """It does not know that yet. An engine that comes back gets the weights of another sibling."""
    first = jax.devices()[0]
    source = {path: jax.device_put(leaf, first) for path, leaf in leaves(target).items()}
    pool.update_weights(source)
    news = len(pool.events())

    def fail() -> None:
        raise EngineBroken("its state is unknown")

    def kinds() -> list[str]:
        return [event["event"] for event in pool.events()[news:] if event["engine"] == 2]

    with paused(pool):
        for array in source.values():
            array.delete()
        faults.delete_leaf(pool, 2)
        pool.runtime.workers[2].channel.run(fail)
        until(lambda: len(kinds()) >= 2)
        assert kinds() == ["engine_quarantined", "engine_recovered"]
    pool.engines[2].generate(input_ids=PROMPTS[0], sampling_params=GREEDY)


def test_weights_come_with_the_sibling_that_has_them(pool: EnginePool, target: Path) -> None:
    """An engine has lost its weights while the steps of all others hang. It comes back without
    weights, and gets them when one of the others comes back."""
    pool.update_weights(target)
    hanging = [faults.hang_in_step(pool, index) for index in (1, 2)]
    try:
        with callers(3) as executor:
            for index, hang in zip((1, 2), hanging, strict=True):
                executor.submit(pool.engines[index].generate, input_ids=PROMPTS[0])
                faults.abandon(pool, hang, index)
            assert states(pool)[1:] == ["abandoned"] * 2
            faults.delete_leaf(pool, 0)
            call = executor.submit(pool.engines[0].generate, input_ids=PROMPTS[0])
            with pytest.raises(NoWeights, match="weights are gone"):
                call.result(SECONDS)
        assert states(pool) == ["unloaded", "abandoned", "abandoned"]
        hanging[0].set()
        until(lambda: states(pool) == ["serving", "serving", "abandoned"])
        serves(pool, target)
    finally:
        for hang in hanging:
            hang.set()
    until(lambda: states(pool) == ["serving"] * 3)
    serves(pool, target)


@pytest.mark.parametrize("change", ["update", "release"])
def test_a_change_does_not_wait_for_requests_pinned_to_a_failed_engine(
    pool: EnginePool, target: Path, change: str
) -> None:
    """The change does not wait for its request, which is continued there when the engine comes
    back."""
    hanging = faults.hang_in_reset(pool, 1)
    faults.raise_in_step(pool, 1)
    with callers(2) as executor:
        try:
            call = executor.submit(
                pool.engines[1].generate, input_ids=PROMPTS[0], sampling_params=GREEDY
            )
            until(lambda: states(pool)[1] == "resetting")
            if change == "update":
                executor.submit(pool.update_weights, target, mode="retract").result(SECONDS)
            else:
                executor.submit(pool.release_memory_occupation).result(SECONDS)
                pool.resume_memory_occupation()
        finally:
            hanging.set()
        assert len(call.result(SECONDS)["output_ids"]) == GREEDY["max_new_tokens"]
    until(lambda: states(pool) == ["serving"] * 3)
    pool.checksum()


def test_the_checkpoints_weights_after_a_failed_copy_are_not_current(
    two: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine is rebuilt to copy another engine's weights. Before it has any of them, its
    return fails and the other engine leaves. It is then rebuilt with the checkpoint's weights."""
    reset, begun, go_on = Assembly.reset, threading.Event(), threading.Event()
    drop, sibling = KVCache.drop, two.runtime.workers[0]

    def failing_reset(self: Assembly) -> None:
        begun.set()
        assert go_on.wait(SECONDS)
        raise faults.Fault("no memory")

    def failing_drop(self: KVCache) -> int:
        monkeypatch.setattr(KVCache, "drop", drop)
        sibling.stop()
        assert sibling.join(SECONDS)
        raise faults.Fault("no memory")

    expected = two.engines[1].generate(input_ids=PROMPTS, sampling_params=GREEDY)
    monkeypatch.setattr(Assembly, "reset", failing_reset)
    faults.raise_in_step(two, 1)
    with callers(1) as executor:
        executor.submit(two.engines[1].generate, input_ids=PROMPTS[0])
        assert begun.wait(SECONDS)
        two.release_memory_occupation()
        monkeypatch.setattr(KVCache, "drop", failing_drop)
        monkeypatch.setattr(Assembly, "reset", reset)
        go_on.set()
        until(lambda: states(two)[1] in ("paused", "unloaded"))
        assert states(two) == ["closed", "paused"]
        two.resume_memory_occupation()
    results = two.engines[1].generate(input_ids=PROMPTS, sampling_params=GREEDY)
    assert [one["output_ids"] for one in results] == [one["output_ids"] for one in expected]


def test_an_engine_that_fails_while_an_update_rolls(pool: EnginePool, target: Path) -> None:
    """The other engines continue with the update, also those after it. It comes back with the
    new weights."""
    reset: list[threading.Event] = []

    def source() -> Iterator[tuple[str, Any]]:
        for number, tensor in enumerate(read_checkpoint(target)[1].items()):
            if number == 1:
                hanging = faults.hang_in_reset(pool, 1)
                faults.raise_in_step(pool, 1)
                executor.submit(
                    pool.engines[1].generate, input_ids=PROMPTS[0], sampling_params=GREEDY
                )
                until(lambda: states(pool)[1] == "resetting")
                reset.append(hanging)
            yield tensor

    with callers(1) as executor:
        try:
            report = pool.update_weights(source(), strategy="rolling", weight_version="new")
            assert report.failed.keys() == {1}
            results = pool.generate_all(input_ids=PROMPTS, sampling_params=GREEDY)
            assert {result["meta_info"]["weight_version"] for result in results} == {"new"}
            assert {result["meta_info"]["engine_index"] for result in results} <= {0, 2}
        finally:
            reset[0].set()
        until(lambda: states(pool) == ["serving"] * 3)
    serves(pool, target)


def test_requests_that_wait_for_weights_survive_an_engine_that_misses_them(
    pool: EnginePool, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights were released, and one of three engines cannot take the new ones, in whatever
    order the engines get to it."""
    left = threading.Event()
    unloaded, load = Recovery.engine_unloaded, EngineWorker.load

    def late(worker: EngineWorker) -> None:
        left.wait(0.5)  # times out, unless the one that misses them has left first
        load(worker)

    def noted(*args: Any) -> None:
        unloaded(*args)
        left.set()

    with callers(1) as executor:
        long = {**GREEDY, "max_new_tokens": 200}
        call = executor.submit(pool.generate_all, input_ids=PROMPTS, sampling_params=long)
        until(lambda: pool.stats()["running"] > 0)
        pool.release_weights()
        monkeypatch.setattr(EngineWorker, "load", late)
        monkeypatch.setattr(Recovery, "engine_unloaded", noted)
        put, updating = jax.device_put, threading.get_ident()

        def full(array: Any, where: Any = None, *args: Any, **options: Any) -> Any:
            if threading.get_ident() == updating and jax.devices()[1].id in faults.placed_on(where):
                raise RuntimeError("out of memory")
            return put(array, where, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(jax, "device_put", full)
            report = pool.update_weights(leaves(target), staging="stream")
        assert report.failed.keys() == {1}
        assert states(pool) == ["serving", "unloaded", "serving"]
        assert [len(one["output_ids"]) for one in call.result(SECONDS)] == [200] * len(PROMPTS)
    pool.update_weights(target)
    serves(pool, target)


def test_weights_are_released_while_an_engine_is_reset(pool: EnginePool, target: Path) -> None:
    """It gives its weights back, too, when it returns."""
    before = in_use(pool)
    hanging = faults.hang_in_reset(pool, 1)
    faults.raise_in_step(pool, 1)
    with callers(1) as executor:
        try:
            executor.submit(pool.engines[1].generate, input_ids=PROMPTS[0], sampling_params=GREEDY)
            until(lambda: states(pool)[1] == "resetting")
            released = pool.release_weights()
        finally:
            hanging.set()
        until(lambda: states(pool) == ["unloaded"] * 3)
        assert in_use(pool) == before - released // 2 * 3
        pool.update_weights(target)
    serves(pool, target)


def test_an_engine_is_paused_while_it_is_reset(pool: EnginePool) -> None:
    """It is paused when it returns, until it is told to continue."""
    hanging = faults.hang_in_reset(pool, 1)
    faults.raise_in_step(pool, 1)
    engine = pool.engines[1]
    with callers(1) as executor:
        try:
            call = executor.submit(engine.generate, input_ids=PROMPTS[0], sampling_params=GREEDY)
            until(lambda: states(pool)[1] == "resetting")
            engine.pause_generation("in_place")
        finally:
            hanging.set()
        until(lambda: states(pool)[1] not in ("resetting", "quarantined"))
        assert states(pool) == ["serving", "paused", "serving"]
        assert not call.done()
        engine.continue_generation()
        assert len(call.result(SECONDS)["output_ids"]) == GREEDY["max_new_tokens"]


def test_an_engine_that_alone_continues_in_a_paused_pool(pool: EnginePool) -> None:
    """It continues also after it has failed. The others stay paused."""
    pool.pause_generation("in_place")
    try:
        pool.engines[1].continue_generation()
        faults.raise_in_step(pool, 1)
        with callers(1) as executor:
            call = executor.submit(
                pool.engines[1].generate, input_ids=PROMPTS[0], sampling_params=GREEDY
            )
            try:
                assert len(call.result(SECONDS)["output_ids"]) == GREEDY["max_new_tokens"]
            finally:
                states_then = states(pool)
                pool.continue_generation()
    finally:
        pool.continue_generation()
    assert states_then == ["paused", "serving", "paused"]


def test_memory_for_the_kv_cache_is_not_there_yet(pool: EnginePool) -> None:
    """The error names the engine, and the call can be repeated."""
    pool.release_memory_occupation()
    faults.fail_once(faults.scheduler_of(pool, 1).kv_cache, "rebuild")
    with pytest.raises(EnginePoolError, match=r"engine 1 could not allocate its KV cache.* again"):
        pool.resume_memory_occupation()
    assert states(pool) == ["serving", "paused", "serving"]
    assert pool.resume_memory_occupation() > 0
    assert states(pool) == ["serving"] * 3


def test_a_kv_cache_that_does_not_come_back(pool: EnginePool, target: Path) -> None:
    """There is no memory for it at the end of an update. That engine recovers at once, with the new
    weights, before it gets a request."""
    news = len(pool.events())

    def wrong(*_: Any) -> None:
        raise faults.Fault("no memory")

    faults.once([(faults.scheduler_of(pool, 1).kv_cache, "rebuild")], 1, wrong)
    report = pool.update_weights(target, free_kv=True)
    assert [engine.engine_index for engine in report.engines] == [0, 2]
    until(lambda: states(pool) == ["serving"] * 3)
    serves(pool, target)
    events = [(event["event"], event["engine"]) for event in pool.events()[news:]]
    assert events == [("engine_quarantined", 1), ("engine_recovered", 1)]


def test_weights_are_deleted_after_a_rebuild_that_kept_them(
    alone: EnginePool, target: Path
) -> None:
    """The rebuilt engine still knows that another holder may delete them."""
    source = {path: jax.device_put(leaf, jax.devices()[0]) for path, leaf in leaves(target).items()}
    alone.update_weights(source)
    faults.raise_in_reset(alone, 0)
    faults.raise_in_step(alone, 0)
    alone.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    assert alone.events()[-1]["by"] == "rebuild"
    for array in source.values():
        array.delete()
    with pytest.raises(NoWeights, match=r"deleted or donated by their owner.*copy=True"):
        alone.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    assert states(alone) == ["unloaded"]


def test_a_pause_that_aborts_waits_for_requests_of_a_failed_engine(
    pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are on their way from the engine to the queue, and end like all others."""
    moving, go_on, failed = threading.Event(), threading.Event(), Recovery.engine_failed

    def late(*args: Any) -> None:
        moving.set()
        assert go_on.wait(SECONDS)
        failed(*args)

    monkeypatch.setattr(Recovery, "engine_failed", late)
    faults.raise_in_step(pool, 1)
    with callers(2) as executor:
        call = executor.submit(
            pool.engines[1].generate, input_ids=PROMPTS[0], sampling_params=GREEDY
        )
        assert moving.wait(SECONDS)
        pause = executor.submit(pool.pause_generation, "abort")
        try:
            until(lambda: states(pool)[::2] == ["paused"] * 2)
            wait([pause], timeout=0.5)  # it ends only if it does not wait for the request
            go_on.set()
            pause.result(SECONDS)
            until(call.done, seconds=10)
            assert call.result()["meta_info"]["finish_reason"]["type"] == "abort"
        finally:
            go_on.set()
            pool.continue_generation()
    until(lambda: states(pool) == ["serving"] * 3)


def test_the_only_engine_fails_right_after_an_update(
    alone: EnginePool, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights cannot be compared with those that were staged. The error is not that no engine
    is left: it comes back with the new weights."""
    apart, go_on = threading.Event(), threading.Event()
    rebuild, compare = Assembly.rebuild, update.swap_fingerprints

    def late(self: Assembly, **options: bool) -> None:
        self.take_apart()
        apart.set()
        assert go_on.wait(SECONDS)
        rebuild(self, **options)

    def after_a_failure(*args: Any) -> Any:
        faults.raise_in_reset(alone, 0)
        faults.raise_in_step(alone, 0)
        assert apart.wait(SECONDS)
        return compare(*args)

    monkeypatch.setattr(Assembly, "rebuild", late)
    monkeypatch.setattr(update, "swap_fingerprints", after_a_failure)
    with callers(1) as executor:
        long = GREEDY | {"max_new_tokens": 400}
        call = executor.submit(alone.generate, input_ids=PROMPTS[0], sampling_params=long)
        until(lambda: running(alone) == 1)
        try:
            with pytest.raises(WeightUpdateFailed, match=r"engine 0: Fault.* come back"):
                alone.update_weights(target, mode="retract")
        finally:
            go_on.set()
        assert call.result(SECONDS)["meta_info"]["weight_version"] == 1
    serves(alone, target)


def test_a_check_of_the_checkpoint_fails_once(
    alone: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only engine is rebuilt from its checkpoint, and then again. It answers its own calls."""
    checks: list[Any] = []

    def failing(*args: Any) -> None:
        checks.append(args)
        raise faults.Fault("no memory for a check")

    monkeypatch.setattr(build, "check_model", failing)
    faults.raise_in_reset(alone, 0)
    faults.delete_leaf(alone, 0)
    expected = alone.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    assert len(checks) == 1
    result = alone.engines[0].generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    assert result["output_ids"] == expected["output_ids"]


def test_no_engine_can_be_asked_while_the_only_one_is_reset(
    alone: EnginePool, target: Path
) -> None:
    """The error says that it comes back, and it does."""
    hanging = faults.hang_in_reset(alone, 0)
    faults.raise_in_step(alone, 0)
    with callers(1) as executor:
        try:
            call = executor.submit(alone.generate, input_ids=PROMPTS[0], sampling_params=GREEDY)
            until(lambda: states(alone) == ["resetting"])
            for change in (
                alone.release_weights,
                alone.release_memory_occupation,
                lambda: alone.pause_generation("drain"),
                lambda: alone.update_weights(target),
                alone.checksum,
                alone.quick_checksum,
                alone.perturb_weights,
                lambda: alone.get_weights_by_name("model.norm.weight"),
            ):
                with pytest.raises(WeightUpdateFailed, match=r"engine 0: Fault.* try again"):
                    change()
        finally:
            hanging.set()
        assert len(call.result(SECONDS)["output_ids"]) == GREEDY["max_new_tokens"]
