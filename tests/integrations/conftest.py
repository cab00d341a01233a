"""What these tests share: engines on upstream's FlashAttention backend, interpreted on CPU."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from enginepool import EnginePool
from tests.support.faults import hang_in_step, scheduler_of
from tests.support.interpreter import flash_attention
from tests.support.liveness import SECONDS, callers, until
from tests.support.pools import SMALL

OpenFlash = Callable[..., Any]
GREEDY = {"temperature": 0, "ignore_eos": True}


def ids(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(256), k=length)


@contextmanager
def under_way(pool: EnginePool, prompts: list[list[int]], params: Any) -> Iterator[list[Any]]:
    """The block runs while the first engine is in its fourth step for these prompts. The step
    ends when the block gives the engine a job. After the block the list has the results."""
    results: list[Any] = []
    channel, step = pool.runtime.workers[0].channel, hang_in_step(pool, 0, at=4)

    def let_go() -> None:
        try:
            until(channel.has_jobs)
        finally:
            step.set()

    with callers(2) as executor:
        answer = executor.submit(
            pool.generate_all, None, params, input_ids=prompts, return_logprob=True
        )
        assert step.begun.wait(SECONDS)
        wanted = executor.submit(let_go)
        yield results
        wanted.result(SECONDS)
        results += answer.result(SECONDS)


@pytest.fixture(scope="module")
def open_flash() -> Iterator[OpenFlash]:
    """`with open_flash(model, devices=1, page_size=16, **options) as pool`."""

    @contextmanager
    def open_pool(model: Path, devices: int = 1, **options: Any) -> Iterator[EnginePool]:
        settings = SMALL | {"attention_backend": "fa", "page_size": 16} | options
        with EnginePool(str(model), devices=devices, **settings) as pool:
            for engine in range(devices):
                runner = scheduler_of(pool, engine).tp_worker.worker.model_runner
                assert type(runner.attn_backend).__name__ == "FlashAttention"
            yield pool

    with flash_attention():
        yield open_pool
