"""Timeouts, aborts, cancelled tasks, closed iterators and pauses affect exactly their own
requests."""

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from enginepool import EnginePool, RequestFailed, RequestsFailed
from tests.support import faults
from tests.support.liveness import (
    SECONDS,
    all_hang,
    at_rest,
    callers,
    hanging_in_steps,
    has_jobs,
    idle,
    let_go,
    paused,
    running,
    until,
    waiting,
)
from tests.support.pools import MakePool, same

PROMPTS = [[65 + i, 90 - i, 40 + i, *range(50, 50 + 3 * i)] for i in range(8)]
LONG = {"temperature": 0.0, "max_new_tokens": 450, "ignore_eos": True}
SIXTY = {"temperature": 0.0, "max_new_tokens": 60, "ignore_eos": True}


@pytest.fixture(autouse=True)
def no_leak(pool: EnginePool) -> Any:
    """After each test all engines serve and hold no request, slot or KV page. Upstream checks
    this whenever an engine becomes idle, and an engine that leaked would be quarantined."""
    yield
    until(lambda: at_rest(pool))
    pool.generate_all(input_ids=PROMPTS, sampling_params={"max_new_tokens": 1})
    until(lambda: at_rest(pool))
    assert [engine["state"] for engine in pool.stats()["engines"]] == ["serving"] * 4
    assert waiting(pool) == 0


@pytest.fixture(scope="module")
def expected(pool: EnginePool) -> list[dict[str, Any]]:
    """The results of the prompts when nothing disturbs them."""
    return pool.generate_all(input_ids=PROMPTS, sampling_params=SIXTY, return_logprob=True)


def ended_by(result: dict[str, Any], err_type: str) -> bool:
    reason = result["meta_info"]["finish_reason"]
    assert result["meta_info"]["completion_tokens"] == len(result["output_ids"])
    return (reason["type"], reason.get("err_type")) == ("abort", err_type)


# Timeouts


def test_timeout(pool: EnginePool, expected: list[dict[str, Any]]) -> None:
    """A timeout ends unfinished outputs. They keep their places and their tokens. Finished
    outputs and another call stay as they are."""
    short = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
    params = [LONG if i % 2 else short for i in range(8)]
    with callers(2) as executor:
        other = executor.submit(
            pool.generate_all, input_ids=PROMPTS, sampling_params=SIXTY, return_logprob=True
        )
        call = executor.submit(
            pool.generate_all, input_ids=PROMPTS, sampling_params=params, timeout=2.0
        )
        same(other.result(SECONDS), expected)
        with paused(pool):  # otherwise the long output might end in time
            results = call.result(SECONDS)
    for i, (result, full) in enumerate(zip(results, expected, strict=True)):
        assert result["meta_info"]["prompt_index"] == i
        count = min(len(result["output_ids"]), 60)
        assert result["output_ids"][:count] == full["output_ids"][:count]
        if i % 2:
            assert ended_by(result, "timeout")
            assert "timeout=2.0 seconds" in result["meta_info"]["finish_reason"]["message"]
            assert len(result["output_ids"]) < 450
        else:
            assert result["meta_info"]["finish_reason"]["type"] == "length"
    assert any(result["output_ids"] for result in results[1::2])


def test_timeout_while_waiting(pool: EnginePool) -> None:
    """A timeout also ends a request that no engine has taken yet, and one on a paused engine, in
    sync and async calls."""
    with paused(pool):
        assert ended_by(pool.generate(input_ids=[65], timeout=0.05), "timeout")

        async def on_a_loop() -> Any:
            return await pool.async_generate(input_ids=[65], timeout=0.05)

        for backend in ("asyncio", "trio"):
            assert ended_by(anyio.run(on_a_loop, backend=backend), "timeout")
    stream = pool.stream(input_ids=[65], sampling_params=LONG, timeout=2)
    next(stream)
    with paused(pool):
        *_, last = stream
    assert ended_by(last, "timeout")


def test_raise_on_error(pool: EnginePool) -> None:
    """With `raise_on_error` early ends are raised as a group, which has the results."""
    short = {"temperature": 0.0, "max_new_tokens": 1}
    finished = pool.stats()["finished"]
    with callers(1) as executor:
        call = executor.submit(
            pool.generate_all,
            input_ids=PROMPTS[:2],
            sampling_params=[short, LONG],
            timeout=1.0,
            raise_on_error=True,
        )
        until(lambda: call.done() or pool.stats()["finished"] > finished)
        with paused(pool), pytest.raises(RequestsFailed, match="1 of 2 outputs") as caught:
            call.result(SECONDS)
    (error,) = caught.value.exceptions
    assert isinstance(error, RequestFailed)
    assert (error.prompt_index, error.err_type) == (1, "timeout")
    assert len(caught.value.results[0]["output_ids"]) == 1
    assert ended_by(caught.value.results[1], "timeout")
    assert caught.value.split(RequestFailed)[0].results == caught.value.results


# Callers that leave


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_cancel_scope(pool: EnginePool, backend: str) -> None:
    """Cancelling a scope around an async call ends its running and queued requests, and no
    others."""

    async def main() -> None:
        results: list[Any] = []

        async def other() -> None:
            results.append(await pool.async_generate(input_ids=[65, 66], sampling_params=SIXTY))

        async with anyio.create_task_group() as group:
            scope = anyio.CancelScope()

            async def cancelled() -> None:
                with scope:
                    await pool.async_generate_all(input_ids=PROMPTS * 4, sampling_params=LONG)

            group.start_soon(cancelled)
            while running(pool) < 16:
                await anyio.sleep(0.01)
            group.start_soon(other)
            scope.cancel()
        assert scope.cancelled_caught
        assert results[0]["meta_info"]["completion_tokens"] == 60

    aborted = pool.stats()["aborted"]
    anyio.run(main, backend=backend)
    until(lambda: at_rest(pool))
    assert pool.stats()["aborted"] == aborted + 32


def test_cancel_task(pool: EnginePool) -> None:
    """`task.cancel()` on plain asyncio does the same for a stream with a time limit."""

    async def consume() -> None:
        async for _ in pool.async_stream(input_ids=[65] * 5, sampling_params=LONG):
            await pool.async_pause_generation("in_place")  # otherwise it might end in time

    async def main() -> None:
        task = asyncio.create_task(pool.async_generate(input_ids=[65] * 5, sampling_params=LONG))
        while not running(pool):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(consume(), 0.5)

    aborted = pool.stats()["aborted"]
    asyncio.run(main())
    pool.continue_generation()
    until(lambda: at_rest(pool))
    assert pool.stats()["aborted"] == aborted + 2


def test_close_iterator(pool: EnginePool) -> None:
    """Closing an iterator early ends its requests: by `close`, by `break` or by dropping it."""
    aborted = pool.stats()["aborted"]
    stream = pool.stream(input_ids=PROMPTS[:3], sampling_params=LONG)
    next(stream)
    stream.close()
    params = [{"max_new_tokens": 1}] + [LONG] * 2
    for _ in pool.as_completed(input_ids=PROMPTS[:3], sampling_params=params):
        break
    until(lambda: at_rest(pool))
    assert pool.stats()["aborted"] == aborted + 5

    async def main() -> None:
        chunks = pool.async_stream(input_ids=PROMPTS[:3], sampling_params=LONG)
        await anext(chunks)
        await chunks.aclose()

    asyncio.run(main())
    until(lambda: at_rest(pool))
    assert pool.stats()["aborted"] == aborted + 8


def test_an_iterator_that_was_never_started(pool: EnginePool) -> None:
    """An iterator whose first chunk nobody asked for has started nothing."""
    until(lambda: idle(pool))
    before = pool.stats()
    iterators = [pool.stream(input_ids=[65]), pool.as_completed(input_ids=[65])]
    del iterators
    after = pool.stats()
    assert [e["steps"] for e in after["engines"]] == [e["steps"] for e in before["engines"]]


# Aborting by id


def test_abort_by_id(pool: EnginePool) -> None:
    """The id must be equal. Upstream would end every request whose id begins with it."""
    from sgl_jax.srt.managers.io_struct import GenerateReqInput

    manager = pool.engines[0].tokenizer_manager

    async def call(rid: str) -> Any:
        asked = GenerateReqInput(input_ids=[65, 66], rid=rid, sampling_params=LONG)
        return await anext(manager.generate_request(asked, None))

    async def main() -> list[Any]:
        tasks = [asyncio.create_task(call(rid)) for rid in ("a", "ab", "abc")]
        while running(pool) < 3:
            await asyncio.sleep(0.01)
        assert pool.abort_request("nobody") == 0
        assert pool.abort_request("ab") == 1
        manager.abort_request("")
        return await asyncio.gather(*tasks)

    results = asyncio.run(main())
    assert [result["meta_info"]["id"] for result in results] == ["a", "ab", "abc"]
    assert [result["meta_info"]["completion_tokens"] == 450 for result in results] == [
        True,
        False,
        True,
    ]
    assert ended_by(results[1], "cancelled")


def test_abort_all(pool: EnginePool) -> None:
    """`abort_all` ends running and queued requests, which keep their tokens."""
    with callers(1) as executor:
        call = executor.submit(pool.generate_all, input_ids=PROMPTS * 4, sampling_params=LONG)
        until(lambda: running(pool) == 16 and waiting(pool) == 16)
        assert pool.abort_request(abort_all=True) == 32
        results = call.result(SECONDS)
    assert all(ended_by(result, "cancelled") for result in results)
    assert sum(bool(result["output_ids"]) for result in results) <= 16


def test_abort_on_the_way_to_the_queue(pool: EnginePool) -> None:
    """The abort comes when the call is known and does not yet wait in the queue. It ends at once,
    also if no engine takes it."""
    dispatch = pool.runtime.dispatch
    with paused(pool):
        call = pool.runtime.input_processor.make_call(None, LONG, {"input_ids": [65]})
        dispatch.abort(call.requests, "abort_request", "cancelled")
        dispatch.submit(call)
        assert call.done
        assert waiting(pool) == 0


def test_abort_in_a_chunked_prefill(pool: EnginePool) -> None:
    """A prompt that is aborted between two chunks of its prefill leaves nothing behind."""
    engine, prompt = pool.engines[0], [65, 66] * 200
    for chunk in (1, 3, 6):
        pool.flush_cache()
        hang = faults.hang_in_step(pool, 0, at=chunk)
        with callers(1) as executor:
            try:
                call = executor.submit(engine.generate, input_ids=prompt, sampling_params=SIXTY)
                assert hang.begun.wait(SECONDS)
                assert pool.abort_request(abort_all=True) == 1
            finally:
                hang.set()
            assert ended_by(call.result(SECONDS), "cancelled")
        until(lambda: at_rest(pool))


# Pauses


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@pytest.mark.parametrize("moment", ["prefill", "decode"])
def test_pause(pool: EnginePool, expected: list[dict[str, Any]], mode: str, moment: str) -> None:
    """A pause loses nothing. After six pauses, right after the prefill or later, ids and log-
    probabilities are as without. While paused, no step runs."""
    first = 1 if moment == "prefill" else 4
    with callers(2) as executor, hanging_in_steps(pool, first) as hangs:
        finished = pool.stats()["finished"]
        call = executor.submit(
            pool.generate_all, input_ids=PROMPTS, sampling_params=SIXTY, return_logprob=True
        )
        for number in range(6):
            if number == 0:
                until(lambda: all_hang(hangs))
                pause = executor.submit(pool.pause_generation, mode)
                until(lambda: has_jobs(pool))
                let_go(hangs)
                pause.result(SECONDS)
            else:
                until(lambda: running(pool) or call.done())
                if moment == "decode":
                    until_steps(pool, 3, call.done)
                pool.pause_generation(mode)
            stats = pool.stats()
            assert all(engine["state"] == "paused" for engine in stats["engines"])
            held = stats["running"] + stats["waiting"]
            assert held == 8 - (stats["finished"] - finished)
            if mode == "retract":
                assert at_rest(pool)
            if number == 0:
                assert held == 8
            assert pool.stats()["engines"] == stats["engines"]
            pool.continue_generation()
        same(call.result(SECONDS), expected)


def until_steps(pool: EnginePool, count: int, done: Callable[[], bool]) -> None:
    """Wait until an engine has taken this many more steps."""

    def steps() -> int:
        return max(engine["steps"] for engine in pool.stats()["engines"])

    start = steps()
    until(lambda: steps() >= start + count or done())


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pause_in_a_chunked_prefill(pool: EnginePool, mode: str) -> None:
    """A pause between two chunks of long prompts changes no output."""
    prompts = [[60 + i, *range(33, 120)] * 4 for i in range(6)]
    params = {**SIXTY, "max_new_tokens": 8}
    expected = pool.generate_all(input_ids=prompts, sampling_params=params, return_logprob=True)
    pool.flush_cache()
    with callers(1) as executor:
        call = executor.submit(
            pool.generate_all, input_ids=prompts, sampling_params=params, return_logprob=True
        )
        for _ in range(8):
            until(lambda: running(pool) or call.done())
            pool.pause_generation(mode)
            pool.continue_generation()
        same(call.result(SECONDS), expected)


def test_pause_abort(pool: EnginePool, expected: list[dict[str, Any]]) -> None:
    """This pause ends running and waiting requests, which keep their tokens."""
    stream = pool.stream(input_ids=PROMPTS[0], sampling_params=LONG)
    next(stream)
    with callers(1) as executor:
        call = executor.submit(pool.generate_all, input_ids=PROMPTS * 4, sampling_params=LONG)
        until(lambda: waiting(pool) > 8)
        pool.pause_generation("abort")
        results = [*call.result(SECONDS), list(stream)[-1]]
    assert all(ended_by(result, "cancelled") for result in results)
    first = results[-1]["output_ids"]
    assert first[:60] == expected[0]["output_ids"][: len(first)][:60]
    pool.continue_generation()


def test_pause_drain(pool: EnginePool, expected: list[dict[str, Any]]) -> None:
    """This pause lets running requests finish. Waiting ones go on waiting."""
    with callers(2) as executor, hanging_in_steps(pool, 2) as hangs:
        call = executor.submit(
            pool.generate_all, input_ids=PROMPTS * 4, sampling_params=SIXTY, return_logprob=True
        )
        until(lambda: all_hang(hangs) and running(pool) == waiting(pool) == 16)
        pause = executor.submit(pool.pause_generation, "drain")
        until(lambda: has_jobs(pool))
        let_go(hangs)
        pause.result(SECONDS)
        stats = pool.stats()
        assert [engine["state"] for engine in stats["engines"]] == ["paused"] * 4
        assert at_rest(pool)
        assert waiting(pool) == 16
        assert not call.done()
        pool.continue_generation()
        same(call.result(SECONDS), expected * 4)


def test_requests_during_a_pause(pool: EnginePool, expected: list[dict[str, Any]]) -> None:
    """Requests that arrive during a pause wait and are served afterwards. A second pause or
    continue has no effect."""
    with callers(1) as executor:
        for mode in ("retract", "in_place", "abort"):
            pool.pause_generation(mode)
            pool.pause_generation(mode)
            call = executor.submit(
                pool.generate_all, input_ids=PROMPTS, sampling_params=SIXTY, return_logprob=True
            )
            until(lambda: waiting(pool) == 8)
            pool.continue_generation()
            pool.continue_generation()
            same(call.result(SECONDS), expected)


def test_flush_cache_while_running(pool: EnginePool, expected: list[dict[str, Any]]) -> None:
    """Flushing the prefix cache under running requests changes no output."""
    with callers(1) as executor:
        call = executor.submit(
            pool.generate_all, input_ids=PROMPTS, sampling_params=SIXTY, return_logprob=True
        )
        for _ in range(4):
            until(lambda: running(pool) or call.done())
            pool.flush_cache()
        same(call.result(SECONDS), expected)
    pool.generate(input_ids=[70] * 40, sampling_params=SIXTY)
    pool.flush_cache()
    again = pool.generate(input_ids=[70] * 40, sampling_params=SIXTY)
    assert again["meta_info"]["cached_tokens"] == 0


def test_retracted_request_that_fills_the_cache(make_pool: MakePool) -> None:
    """A request that needs all of an engine's KV cache resumes after a pause with `retract`.
    Upstream would reserve its whole output besides its tokens so far, and never start it again."""
    pool = make_pool("qwen3", 1, max_total_tokens=128, warmup="none")
    params = {"temperature": 0.0, "max_new_tokens": 100, "ignore_eos": True}
    prompt = list(range(40, 60))
    (undisturbed,) = pool.generate_all(input_ids=[prompt], sampling_params=params)
    pool.flush_cache()
    chunks = pool.stream(input_ids=prompt, sampling_params=params)
    while len(next(chunks)["output_ids"]) < 20:
        pass
    pool.pause_generation("retract")
    pool.continue_generation()
    *_, last = chunks
    assert last["output_ids"] == undisturbed["output_ids"]
    assert last["meta_info"]["cached_tokens"] <= len(prompt)
    until(lambda: at_rest(pool))


def test_timeout_with_a_slow_reader(pool: EnginePool) -> None:
    """A stream's timeout also holds for a reader that never waits for a chunk."""

    def steps() -> int:
        return sum(engine["steps"] for engine in pool.stats()["engines"])

    chunks = []
    for chunk in pool.stream(input_ids=PROMPTS[0], sampling_params=LONG, timeout=0.1):
        chunks.append(chunk)
        read = steps()
        until(lambda read=read: running(pool) == 0 or steps() >= read + 3)
    assert ended_by(chunks[-1], "timeout")


def test_abort_of_no_id_ends_nobody(pool: EnginePool) -> None:
    """An empty id matches no request, not even one without an id."""
    chunks = pool.stream(input_ids=PROMPTS[0], sampling_params=SIXTY)
    next(chunks)
    assert pool.abort_request("") == 0
    *_, last = chunks
    assert last["meta_info"]["finish_reason"]["type"] == "length"
