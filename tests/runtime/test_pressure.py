"""More work than KV cache, and callers who leave at any time: all other requests get the answers
that they get alone, and the allocators have all slots and pages back."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest

from enginepool import EnginePool, InvalidRequest
from enginepool.dispatch.request import Call
from tests.support import faults
from tests.support.liveness import SECONDS, at_rest, callers, until
from tests.support.pools import SMALL, same

# An engine runs four of these at a time and has KV cache for two and a half.
KV_TOKENS = 256
PROMPTS = [[65 + i, 90 - i, 40 + i, *range(50, 54 + i)] for i in range(9)]
GREEDY = {"temperature": 0.0, "max_new_tokens": 96, "ignore_eos": True}
# For these upstream does not reserve their whole length.
STOPPABLE = {"temperature": 0.0, "max_new_tokens": 96}
SHORT = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def pool(model_dir: Callable[[str], Path]) -> Iterator[EnginePool]:
    """Two engines with little KV cache, which reserve little of it for later tokens."""
    options = {**SMALL, "warmup": "none", "context_length": 256, "max_total_tokens": KV_TOKENS}
    options["schedule_conservativeness"] = 0.3
    with EnginePool(str(model_dir("qwen3")), devices=2, **options) as pool:
        yield pool


@pytest.fixture(autouse=True)
def nothing_leaks(pool: EnginePool) -> Iterator[None]:
    """All request slots and KV pages are free again by the allocators' own counts, and no engine
    was reset."""
    pool.flush_cache()
    before = free(pool)
    yield
    until(lambda: at_rest(pool) and pool.stats()["waiting"] == 0)
    pool.flush_cache()
    assert free(pool) == before
    assert before == [(before[0][0], KV_TOKENS)] * 2
    assert pool.events() == []


def free(pool: EnginePool) -> list[tuple[int, int]]:
    """The free request slots and KV tokens of each engine."""
    schedulers = [faults.scheduler_of(pool, engine) for engine in range(2)]
    return [
        (
            scheduler.req_to_token_pool.available_size(),
            scheduler.token_to_kv_pool_allocator.available_size(0),
        )
        for scheduler in schedulers
    ]


def alone(pool: EnginePool, prompts: list[list[int]], params: dict[str, Any]) -> list[Any]:
    """What each request gives alone."""
    results = [
        pool.generate(input_ids=prompt, sampling_params=params, return_logprob=True)
        for prompt in prompts
    ]
    pool.flush_cache()
    return results


def test_more_work_than_kv_cache(pool: EnginePool, retracted: list[int]) -> None:
    """Several times what fits both engines. Upstream retracts requests in the middle, and each
    gives what it gives alone."""
    expected = alone(pool, PROMPTS, STOPPABLE)
    assert retracted == []
    needed = sum(len(p) + len(e["output_ids"]) for p, e in zip(PROMPTS, expected, strict=True))
    assert needed > 2 * KV_TOKENS  # three times as much is asked for
    results = pool.generate_all(
        input_ids=PROMPTS * 3, sampling_params=STOPPABLE, return_logprob=True, timeout=SECONDS
    )
    assert sum(retracted) > 0
    same(results, expected * 3)


def test_an_aborted_output_is_not_retracted(
    pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output that has the fewest tokens is aborted at a step boundary at which the KV cache is
    full. It ends there, and does not wait for KV cache to gain another token."""
    engine: Any = pool.engines[0]
    channel, scheduler = pool.runtime.workers[0].channel, faults.scheduler_of(pool, 0)
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    aborted, ended = dict[str, int](), dict[str, int]()

    def full() -> bool:
        rows = len(scheduler.running_batch.reqs_info[0].reqs or ())
        return allocator.available_size(0) + tree.evictable_size(dp_rank=0) < rows

    def abort() -> None:
        reqs = scheduler.running_batch.reqs_info[0].reqs
        last = min(reqs, key=lambda req: (len(req.output_ids), -len(req.origin_input_ids)))
        aborted[last.rid] = channel.steps
        request = scheduler.running.held[last.rid]
        pool.runtime.dispatch.abort([request], "it has to go", "cancelled")

    finish = Call.finish

    def finishing(call: Call, request: Any, reason: Any) -> bool:
        ended[request.internal_rid] = channel.steps
        return finish(call, request, reason)

    monkeypatch.setattr(Call, "finish", finishing)
    with callers(1) as executor:
        call = executor.submit(
            engine.generate, input_ids=PROMPTS[:4], sampling_params=STOPPABLE, return_logprob=True
        )
        channel.run_when(full, abort).result(SECONDS)
        results = call.result(SECONDS)
    (rid,) = aborted
    assert ended[rid] == aborted[rid]
    reasons = [result["meta_info"]["finish_reason"] for result in results]
    assert [one["message"] for one in reasons if one["type"] == "abort"] == ["it has to go"]


def test_request_that_can_never_fit(pool: EnginePool) -> None:
    """It is refused before anything starts, with the room that there is. One that needs exactly
    this room is answered, among others."""
    prompt = [65] * 50
    with pytest.raises(InvalidRequest, match="max_new_tokens=250 does not fit") as caught:
        pool.generate_all(
            input_ids=[PROMPTS[0], prompt], sampling_params={**GREEDY, "max_new_tokens": 250}
        )
    assert caught.value.prompt_index == 0
    room = int(str(caught.value).split("room for ")[1].split()[0])
    assert f"max_total_tokens={KV_TOKENS}" in str(caught.value)
    with pytest.raises(InvalidRequest, match=rf"{KV_TOKENS} tokens are too many"):
        pool.generate(input_ids=[65] * KV_TOKENS)
    params = [{**GREEDY, "max_new_tokens": room}] + [SHORT] * 4
    results = pool.generate_all(input_ids=[PROMPTS[0], *PROMPTS[1:5]], sampling_params=params)
    assert [len(result["output_ids"]) for result in results] == [room, 40, 40, 40, 40]


def steps(pool: EnginePool) -> int:
    return sum(engine["steps"] for engine in pool.stats()["engines"])


class Leavers:
    """Callers who leave after a random number of steps, each in another way."""

    def __init__(self, pool: EnginePool, seed: int) -> None:
        self._pool, self._random = pool, random.Random(seed)
        self._lock = threading.Lock()
        self.done = threading.Event()
        self.left = 0

    def _draw(self) -> tuple[list[list[int]], int]:
        with self._lock:
            self.left += 1
            return self._random.sample(PROMPTS, 3), self._random.randint(0, 25)

    def close_streams(self) -> None:
        while not self.done.is_set():
            prompts, count = self._draw()
            stream = self._pool.stream(input_ids=prompts, sampling_params=GREEDY)
            for _, _ in zip(range(count), stream, strict=False):
                pass
            stream.close()

    def time_out(self) -> None:
        while not self.done.is_set():
            prompts, count = self._draw()
            seconds = 0.001 + count / 200
            self._pool.generate_all(input_ids=prompts, sampling_params=GREEDY, timeout=seconds)

    def abort(self) -> None:
        """By the id, which a stream reports."""
        while not self.done.is_set():
            prompts, count = self._draw()
            stream = self._pool.stream(input_ids=prompts, sampling_params=GREEDY)
            for seen, chunk in enumerate(stream):
                if seen >= count:
                    self._pool.abort_request(chunk["meta_info"]["id"])

    def cancel_tasks(self, backend: str) -> None:
        anyio.run(self._cancel_tasks, backend=backend)

    async def _cancel_tasks(self) -> None:
        while not self.done.is_set():
            prompts, count = self._draw()
            async with anyio.create_task_group() as group:
                for prompt in prompts:
                    group.start_soon(self._generate, prompt)
                end = steps(self._pool) + count
                while steps(self._pool) < end:
                    await anyio.sleep(0.002)
                group.cancel_scope.cancel()

    async def _generate(self, prompt: list[int]) -> None:
        await self._pool.async_generate(input_ids=prompt, sampling_params=GREEDY)


@pytest.mark.parametrize("seed", [1, 2])
def test_callers_who_leave_under_load(pool: EnginePool, seed: int) -> None:
    """Closed streams, timeouts, aborts, cancelled asyncio and trio tasks at once. Callers who
    stay get what they get alone."""
    expected = alone(pool, PROMPTS, SHORT)
    leavers = Leavers(pool, seed)
    ways: list[Callable[[], None]] = [
        leavers.close_streams,
        leavers.time_out,
        leavers.abort,
        lambda: leavers.cancel_tasks("asyncio"),
        lambda: leavers.cancel_tasks("trio"),
    ]
    with callers(len(ways)) as executor:
        running = [executor.submit(way) for way in ways]
        try:
            stays_until(pool, expected, lambda: leavers.left >= 60)
        finally:
            leavers.done.set()
        for future in running:
            future.result(SECONDS)


def stays_until(pool: EnginePool, expected: list[Any], enough: Callable[[], bool]) -> None:
    with ThreadPoolExecutor(1) as executor:
        while True:
            call = executor.submit(
                pool.generate_all, input_ids=PROMPTS, sampling_params=SHORT, return_logprob=True
            )
            same(call.result(SECONDS), expected)
            if enough():
                return
