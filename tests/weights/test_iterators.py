"""What an iterator may do with the pool while `update_weights` reads it."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool import EnginePool, InvalidRequest, InvalidWeights, NoWeights, PoolClosed
from tests.support.layouts import GREEDY, PROMPTS, answers, serves, tensors
from tests.support.liveness import SECONDS, callers
from tests.support.marks import slow
from tests.support.pools import SMALL, same

CALLS: dict[str, Callable[[EnginePool], Any]] = {
    "update_weights": lambda pool: pool.update_weights({}),
    "pause_generation": lambda pool: pool.pause_generation(),
    "continue_generation": lambda pool: pool.continue_generation(),
    "flush_cache": lambda pool: pool.flush_cache(),
    "release_weights": lambda pool: pool.release_weights(),
    "release_memory_occupation": lambda pool: pool.release_memory_occupation(),
    "resume_memory_occupation": lambda pool: pool.resume_memory_occupation(),
    "flush_cache of an Engine": lambda pool: pool.engines[0].flush_cache(),
    "flush_cache on a loop": lambda pool: asyncio.run(pool.async_flush_cache()),
}


def interrupted(model: Path, call: Callable[[], Any]) -> Iterator[tuple[str, np.ndarray]]:
    """A checkpoint's tensors, with a call between two of them."""
    for number, item in enumerate(tensors(model).items()):
        if number == 5:
            call()
        yield item


@pytest.mark.parametrize("staging", ["double", *slow("stream")])
@pytest.mark.parametrize("name", CALLS)
def test_calls_that_wait_for_the_update_are_refused(
    llama: EnginePool, target: Callable[[str], Path], name: str, staging: Any
) -> None:
    """The update waits for the iterator, so a call in it cannot wait for the update. An error
    names both calls, the update fails with it like with any error of an iterator, and the pool
    keeps its weights."""
    before, expected = llama.checksum(), answers(llama)
    source = interrupted(target("llama"), lambda: CALLS[name](llama))
    with callers(1) as executor:
        update = executor.submit(llama.update_weights, source, staging=staging)
        with pytest.raises(InvalidRequest, match=rf"{name.split()[0]}\(\) inside update_weights"):
            update.result(SECONDS)
    assert llama.checksum() == before
    same(answers(llama), expected)
    CALLS["flush_cache"](llama)


def test_calls_for_another_pool(
    llama: EnginePool, pool: EnginePool, target: Callable[[str], Path]
) -> None:
    """An iterator may steer a pool that does not wait for it."""
    source = interrupted(target("llama"), lambda: pool.flush_cache())
    with callers(1) as executor:
        executor.submit(llama.update_weights, source).result(SECONDS)


@pytest.mark.parametrize("staging", ["double", "stream"])
def test_a_part_of_weights_that_were_released(
    llama: EnginePool, target: Callable[[str], Path], staging: Any
) -> None:
    """What the iterator has is known at its end only. The engines stay without weights."""
    llama.release_weights()
    part = iter(list(tensors(target("llama")).items())[:1])
    with pytest.raises(InvalidWeights, match="neither on engine 0 nor in the source"):
        llama.update_weights(part, strict=False, staging=staging)
    with pytest.raises(NoWeights):
        answers(llama)
    llama.update_weights(iter(tensors(target("llama")).items()), strict=False, staging=staging)
    serves(llama, target("llama"))


def test_generating_while_engines_serve(llama: EnginePool, target: Callable[[str], Path]) -> None:
    """With staging="double" the old weights answer while the new ones are read."""
    expected, results = answers(llama), []
    source = interrupted(target("llama"), lambda: results.extend(answers(llama)))
    with callers(1) as executor:
        executor.submit(llama.update_weights, source, staging="double").result(SECONDS)
    same(results, expected)


@pytest.mark.parametrize("options", [{"staging": "stream"}, {"free_kv": True}], ids=str)
@pytest.mark.parametrize("begun", [False, True], ids=["a new call", "a stream that goes on"])
def test_generating_while_engines_are_stopped(
    llama: EnginePool, target: Callable[[str], Path], options: dict[str, Any], begun: bool
) -> None:
    """No engine takes a step until the update is over, so calls that would wait for one are
    refused. So is the next step of a stream that began before."""
    before = llama.checksum()
    stream = llama.stream(None, {**GREEDY, "max_new_tokens": 200}, input_ids=PROMPTS[0])
    next(stream)

    def call() -> None:
        if begun:
            list(stream)
        else:
            answers(llama)

    source = interrupted(target("llama"), call)
    with callers(1) as executor:
        update = executor.submit(llama.update_weights, source, mode="retract", **options)
        with pytest.raises(InvalidRequest, match=r"inside update_weights.*double"):
            update.result(SECONDS)
    assert llama.checksum() == before
    assert begun or len(list(stream)[-1]["output_ids"]) == 200


@pytest.mark.parametrize("staging", ["double", "stream"])
def test_closing(model_dir: Callable[[str], Path], staging: Any) -> None:
    """The iterator may close the pool. The update raises PoolClosed."""
    pool = EnginePool(str(model_dir("llama")), devices=2, warmup="none", **SMALL).open()
    source = interrupted(model_dir("llama"), pool.close)
    with callers(1) as executor, pytest.raises(PoolClosed):
        executor.submit(pool.update_weights, source, staging=staging).result(SECONDS)
