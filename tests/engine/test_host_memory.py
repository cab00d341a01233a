"""An array that an engine has handed to its device does not change before the device has read
it."""

import threading
from typing import Any

import pytest

from enginepool import EnginePool
from tests.support.host_memory import watching
from tests.support.liveness import SECONDS, callers, idle, until
from tests.support.marks import slow, steady_decode
from tests.support.pools import NATIVE_PAGES, MakePool
from tests.support.steady import OPTIONS, joins, penalised, several_at_once

pytestmark = steady_decode

# Some prompts are prefilled in chunks. Together they do not fit the KV cache.
PROMPTS = [[5 + i, *range(9, 9 + 23 * (i % 9))] for i in range(24)]


@pytest.mark.parametrize("page_size", [1, *slow(*([8] if NATIVE_PAGES else []))])
def test_while_steps_are_in_flight(make_pool: MakePool, page_size: int) -> None:
    """Requests of every kind join, end, are scored, paused and retracted."""
    with several_at_once():
        pool = make_pool("qwen3", 2, **OPTIONS | {"page_size": page_size, "max_decode_steps": 8})
        with joins() as joined, watching() as by_thread:
            load(pool, joined)
            until(lambda: idle(pool))
    assert joined
    assert len(by_thread) == 2
    assert all(found.seen > 100 for found in by_thread.values())
    assert [line for found in by_thread.values() for line in found.changed] == []


def load(pool: EnginePool, joined: list[int]) -> None:
    params: list[dict[str, Any]] = penalised(len(PROMPTS), seed=5)
    for place, one in enumerate(params):
        one["max_new_tokens"] += 20
        if place % 6 == 0:
            one |= {"regex": "[0-9]{1,60}", "frequency_penalty": 0.0, "presence_penalty": 0.0}
            one |= {"min_new_tokens": 0}
    with callers() as callers_of:
        generate, both = pool.generate_all, {"input_ids": PROMPTS, "sampling_params": params}
        first = callers_of.submit(generate, **both, return_logprob=True, top_logprobs_num=3)
        until(lambda: joined or first.done())
        scored = callers_of.submit(
            pool.score, input_ids=[PROMPTS[8]] * 2, continuation_ids=[[1, 2], [3]]
        )
        pool.pause_generation("retract")
        pool.continue_generation()
        later = callers_of.submit(generate, **both)
        for future in (first, scored, later):
            future.result(SECONDS)


def test_an_early_write_is_noticed() -> None:
    """A write before the device has read the array is noticed. A later write is allowed."""
    import jax
    import numpy as np

    from enginepool.engine.common_programs import OnAnyDevice
    from enginepool.engine.device_wait import DeviceWait
    from enginepool.engine.gil_limiter import process_limiter

    class Runner:
        def compute_logprobs(self) -> None: ...

    wait = DeviceWait(Runner(), process_limiter())
    double = OnAnyDevice(jax.jit(lambda array: 2 * array))
    early, late = np.zeros(4, np.int32), np.zeros(4, np.int32)

    def engine() -> None:
        first = double(jax.device_put(early))
        second = double(late)
        wait.until_ready(first)
        early[0] = late[0] = 7
        wait.until_ready(second)

    with watching() as by_thread:
        thread = threading.Thread(target=engine, name="a-pool-engine-0")
        thread.start()
        thread.join()
    [found] = by_thread.values()
    assert set(found.changed) == {"int32(4,) at [0]: [0] is [7]"}
