"""Weights are staged now and committed later: what can happen in between."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import jax
import pytest

from enginepool import (
    EnginePool,
    InvalidRequest,
    InvalidWeights,
    PoolClosed,
    StaleWeights,
    WeightUpdateFailed,
)
from enginepool.runtime import update
from tests.runtime.test_swap_faults import broken_commit, states, unchanged, versions
from tests.support import faults
from tests.support.layouts import GREEDY, PROMPTS, answers, leaves, serves
from tests.support.liveness import SECONDS, callers, until
from tests.support.pools import SMALL, in_use, same


@pytest.fixture(scope="module")
def failing(model_dir: Callable[[str], Path]) -> Iterator[EnginePool]:
    """Two engines that tests may let fail."""
    options = {"devices": 2, "warmup": "none", "max_restarts": 1000}
    with EnginePool(str(model_dir("qwen3")), **options, **SMALL) as pool:
        yield pool
        pool.update_weights(model_dir("qwen3"), weight_version=0)


def fail(pool: EnginePool, engine: int, executor: Executor) -> Future[Any]:
    """Let a step of an engine fail. What it was asked for runs when it is back."""
    faults.raise_in_step(pool, engine)
    generate = pool.engines[engine].generate
    return executor.submit(generate, input_ids=PROMPTS[0], sampling_params=GREEDY)


def test_nothing_changes_before_the_commit(four: EnginePool, target: Callable[[str], Path]) -> None:
    with unchanged(four):
        staged = four.stage_weights(target("qwen3"), weight_version="next")
        assert staged.weight_version == "next"
        assert four.stats()["weight_version"] == 0
        assert versions(four) == {0}
        held = in_use(four)
        staged.discard()
        assert in_use(four) == held - 4 * staged.nbytes


def test_commit(four: EnginePool, target: Callable[[str], Path]) -> None:
    """The same report and the same weights as from `update_weights`. A second commit is refused."""
    memory = in_use(four)
    one_go = four.update_weights(target("qwen3"))
    four.update_weights(four.config.model)
    staged = four.stage_weights(target("qwen3"))
    report = staged.commit(mode="retract")
    assert report.mode == "retract"
    assert report.weight_version == staged.weight_version == one_go.weight_version + 2
    assert report.nbytes == one_go.nbytes
    assert report.staged == one_go.staged == four.checksum()
    assert report.seconds.keys() == one_go.seconds.keys()
    assert [e.engine_index for e in report.engines] == [0, 1, 2, 3]
    assert versions(four) == {report.weight_version}
    with pytest.raises(StaleWeights, match="committed already"):
        staged.commit()
    assert in_use(four) == memory
    serves(four, target("qwen3"))


def test_generation_goes_on_between(four: EnginePool, target: Callable[[str], Path]) -> None:
    """Calls, pauses and other steering are not blocked. A commit drains running requests."""
    expected = answers(four)
    staged = four.stage_weights(target("qwen3"), expires_after=None)
    same(answers(four), expected)
    four.pause_generation()
    four.continue_generation()
    four.flush_cache()
    with callers(1) as executor:
        call = executor.submit(answers, four)
        staged.commit()
        for result in call.result():
            assert len(result["meta_info"]["weight_versions"]) == 1
    serves(four, target("qwen3"))


def test_expiry(four: EnginePool, target: Callable[[str], Path]) -> None:
    with unchanged(four):
        memory = in_use(four)
        staged = four.stage_weights(target("qwen3"), expires_after=0.05)
        until(lambda: "expired" in repr(staged))
        until(lambda: in_use(four) == memory)  # the timer's thread may still be giving it back
        with pytest.raises(StaleWeights, match=r"expired, 0\.05 seconds"):
            staged.commit()
    with pytest.raises(InvalidRequest, match="expires_after=0"):
        four.stage_weights(target("qwen3"), expires_after=0)


def test_another_set_in_between(four: EnginePool, target: Callable[[str], Path]) -> None:
    first = four.stage_weights(target("qwen3"))
    with pytest.raises(InvalidWeights):  # it does not fit, so the staged set stays
        four.stage_weights({"model.norm.weight": [1.0]})
    second = four.stage_weights(target("qwen3"))
    with pytest.raises(StaleWeights, match="another set of weights"):
        first.commit()
    report = four.update_weights(four.config.model)
    with pytest.raises(StaleWeights, match="another set of weights"):
        second.commit()
    assert four.stats()["weight_version"] == report.weight_version == second.weight_version


def test_a_commit_that_fails_can_be_tried_again(
    four: EnginePool, target: Callable[[str], Path]
) -> None:
    staged = four.stage_weights(target("qwen3"))
    with broken_commit(four, 2, 7), pytest.raises(WeightUpdateFailed):
        staged.commit()
    assert versions(four) == {0}
    with pytest.raises(InvalidRequest, match="mode='never'"):
        staged.commit(mode="never")  # type: ignore[arg-type]
    staged.commit()
    serves(four, target("qwen3"))


def test_a_report_has_no_times_of_a_commit_that_failed(
    four: EnginePool, target: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every commit takes a thousand seconds by this clock. The report of the second one has its
    own only."""
    late, commit = [0.0], update.commit

    def slow(*args: Any) -> Any:
        late[0] += 1000
        return commit(*args)

    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + late[0])
    monkeypatch.setattr(update, "time", clock)
    monkeypatch.setattr(update, "commit", slow)
    staged = four.stage_weights(target("qwen3"))
    late[0] += 1000  # nobody counts these
    with broken_commit(four, 2, 7), pytest.raises(WeightUpdateFailed):
        staged.commit()
    seconds = staged.commit().seconds
    assert {name for name, took in seconds.items() if took >= 1000} == {"commit", "total"}
    assert max(seconds.values()) < 2000
    serves(four, target("qwen3"))


def test_a_shared_leaf_is_deleted_in_between(
    four: EnginePool, target: Callable[[str], Path]
) -> None:
    device = jax.devices()[1]
    source = {path: jax.device_put(leaf, device) for path, leaf in leaves(target("qwen3")).items()}
    with unchanged(four):
        memory = in_use(four)
        staged = four.stage_weights(source)
        gone = list(source)[2]
        source[gone].delete()
        with pytest.raises(InvalidWeights, match="copy=True") as caught:
            staged.commit()
        assert caught.value.names == (gone,)
        staged.discard()
        del caught, staged
        source[gone] = jax.device_put(leaves(target("qwen3"))[gone], device)
        assert in_use(four) == memory
    four.stage_weights(source, copy=True)
    for array in source.values():
        array.delete()


def test_leaves_that_it_does_not_have_are_checked_again(
    four: EnginePool, target: Callable[[str], Path]
) -> None:
    """A partial update is staged while weights are complete. They are released before its
    commit."""
    part = dict(list(leaves(target("qwen3")).items())[:1])
    staged = four.stage_weights(part, strict=False)
    four.release_weights()
    with pytest.raises(InvalidWeights, match="neither on engine 0 nor in the source"):
        staged.commit()
    four.update_weights(target("qwen3"))
    staged = four.stage_weights(target("qwen3"))
    four.release_weights()
    staged.commit()
    serves(four, target("qwen3"))


@pytest.mark.parametrize("rebuilt", [False, True])
def test_an_engine_fails_and_comes_back_in_between(
    failing: EnginePool, target: Callable[[str], Path], rebuilt: bool
) -> None:
    """Recovery does not wait for the commit. After the commit the engine has the new weights."""
    staged = failing.stage_weights(target("qwen3"))
    before = failing.engines[1]
    if rebuilt:
        faults.raise_in_reset(failing, 1)
    with callers(1) as executor:
        fail(failing, 1, executor).result(SECONDS)
    until(lambda: states(failing) == ["serving"] * 2)
    assert (failing.engines[1] is not before) == rebuilt
    report = staged.commit()
    assert [engine.engine_index for engine in report.engines] == [0, 1]
    serves(failing, target("qwen3"))


def test_an_engine_that_was_away_gets_them_from_a_sibling(
    failing: EnginePool, target: Callable[[str], Path]
) -> None:
    let_go = faults.hang_in_reset(failing, 1)
    with callers(1) as executor:
        try:
            fail(failing, 1, executor)
            until(lambda: states(failing)[1] == "resetting")
            # From an iterator, which cannot be read a second time.
            staged = failing.stage_weights(iter(read(target("qwen3"))))
        finally:
            let_go.set()
    until(lambda: states(failing) == ["serving"] * 2)
    report = staged.commit()
    assert [engine.engine_index for engine in report.engines] == [0, 1]
    serves(failing, target("qwen3"))


def test_the_engine_that_staged_first_is_away(
    four: EnginePool, target: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its device may not answer. An engine that has come back gets them from one that serves."""
    put = jax.device_put

    def device_put(arrays: Any, *args: Any, **options: Any) -> Any:
        for array in arrays if isinstance(arrays, list) else [arrays]:
            if isinstance(array, jax.Array) and array.devices() == {jax.devices()[0]}:
                raise RuntimeError("this device does not answer")
        return put(arrays, *args, **options)

    resets = {index: faults.hang_in_reset(four, index) for index in (0, 3)}
    with callers(2) as executor:
        try:
            fail(four, 3, executor)
            until(lambda: states(four)[3] == "resetting")
            staged = four.stage_weights(target("qwen3"))
            resets[3].set()
            until(lambda: states(four)[3] == "serving")
            fail(four, 0, executor)
            until(lambda: states(four)[0] == "resetting")
            with monkeypatch.context() as patch:
                patch.setattr(jax, "device_put", device_put)
                report = staged.commit()
        finally:
            for reset in resets.values():
                reset.set()
    assert [engine.engine_index for engine in report.engines] == [1, 2, 3]
    until(lambda: states(four) == ["serving"] * 4)
    serves(four, target("qwen3"))


def read(model: Path) -> list[tuple[str, Any]]:
    from enginepool.toy.files import read_checkpoint

    return list(read_checkpoint(model)[1].items())


def test_async_twins(four: EnginePool, target: Callable[[str], Path]) -> None:
    async def main() -> None:
        staged = await four.async_stage_weights(target("qwen3"), weight_version="a")
        await staged.async_discard()
        staged = await four.async_stage_weights(target("qwen3"), weight_version="b")
        assert (await staged.async_commit(mode="in_place")).weight_version == "b"

    anyio.run(main)
    assert versions(four) == {"b"}


def test_a_closed_pool_holds_nothing(target: Callable[[str], Path]) -> None:
    before = set(threading.enumerate())
    pool = EnginePool(str(target("qwen3")), devices=1, warmup="none", **SMALL).open()
    staged = pool.stage_weights(target("qwen3"))
    pool.close()
    assert "was closed" in repr(staged)
    assert set(threading.enumerate()) <= before  # idle ones of others may have ended meanwhile
    with pytest.raises(PoolClosed):
        staged.commit()
