"""Closing in the middle of everything returns in time. Waiting callers get an error, and only a
thread inside a call that does not return stays."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from enginepool import EnginePool, InvalidWeights, PoolClosed
from enginepool.engine.build import Assembly
from tests.lora.conftest import LORA
from tests.process.test_faults import SCRIPT
from tests.support import faults
from tests.support.adapters import config, random_adapter
from tests.support.layouts import leaves
from tests.support.liveness import (
    SECONDS,
    all_hang,
    callers,
    hanging_in_steps,
    has_jobs,
    let_go,
    running,
    until,
)
from tests.support.marks import slow
from tests.support.pools import SMALL

PROMPTS = [[65 + i, 90 - i, 40 + i] for i in range(12)]
LONG = {"temperature": 0.0, "max_new_tokens": 450, "ignore_eos": True}
# The timeout of `close`, and how long it may take on a busy machine.
DEADLINE, MOST = 1.5, 60.0


@pytest.fixture
def make(model_dir: Callable[[str], Path]) -> Iterator[Callable[..., EnginePool]]:
    """Makes pools of two engines without warm-up. They are closed at the end."""
    pools = []

    def make(**options: Any) -> EnginePool:
        options = {**SMALL, "warmup": "none", "step_timeout": None} | options
        pools.append(EnginePool(str(model_dir("qwen3")), devices=2, **options))
        return pools[-1].open()

    yield make
    for pool in pools:
        pool.close()


def threads(pool: EnginePool) -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith(pool.name))


def closed_in_time(pool: EnginePool, timeout: float | None = DEADLINE) -> None:
    started = time.monotonic()
    pool.close(timeout)
    assert time.monotonic() - started < MOST


def state(pool: EnginePool, engine: int) -> str:
    return pool.stats()["engines"][engine]["state"]


def weights(pool: EnginePool) -> list[Any]:
    """The engine's own weights, for an update."""
    return list(faults.scheduler_of(pool, 0).tp_worker.worker.model_runner.model_state_leaves)


@contextmanager
def hanging(hang: faults.Hang) -> Iterator[faults.Hang]:
    """The hang ends with the block in any case."""
    try:
        yield hang
    finally:
        hang.set()


def assert_pool_closed_for(calls: list[Future[Any]]) -> None:
    """Every caller gets PoolClosed."""
    for call in calls:
        with pytest.raises(PoolClosed):
            call.result(MOST)


def unfinished_calls(pool: EnginePool) -> int:
    """The number of calls that wait for a request. A caller returns after its last one."""
    return len({id(request.call) for request in pool.runtime.dispatch.unfinished()})


def load(pool: EnginePool, executor: Any) -> list[Future[Any]]:
    """Callers of every kind, with more requests than the engines run at a time."""

    async def generate() -> None:
        await pool.async_generate_all(input_ids=PROMPTS[:3], sampling_params=LONG)

    async def stream() -> None:
        async for _ in pool.async_stream(input_ids=PROMPTS[:3], sampling_params=LONG):
            pass

    def read(iterate: Any) -> None:
        for _ in iterate(input_ids=PROMPTS[:3], sampling_params=LONG):
            pass

    calls = [
        executor.submit(pool.generate_all, input_ids=PROMPTS, sampling_params=LONG),
        executor.submit(read, pool.stream),
        executor.submit(read, pool.as_completed),
        executor.submit(asyncio.run, generate()),
        executor.submit(anyio.run, stream, backend="trio"),
        executor.submit(pool.engines[1].generate, input_ids=PROMPTS[0], sampling_params=LONG),
    ]
    until(lambda: running(pool) == 8)
    return calls


def test_under_load(make: Callable[..., EnginePool]) -> None:
    """From three threads at once, and again. Every caller gets PoolClosed: running or queued, in
    a thread, on asyncio or on trio."""
    pool = make()
    with callers() as executor:
        calls = load(pool, executor)
        barrier = threading.Barrier(3)

        def close() -> list[str]:
            barrier.wait()
            closed_in_time(pool, None)
            return threads(pool)

        closing = [threading_future(close) for _ in range(3)]
        assert_pool_closed_for(calls)
        assert [one.result(MOST) for one in closing] == [[]] * 3
    pool.close()
    assert pool.closed


def threading_future(target: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(target())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run).start()
    return future


@pytest.mark.parametrize("step_timeout", [None, *slow(2.0)])
def test_while_an_engine_is_stuck(make: Callable[..., EnginePool], step_timeout: Any) -> None:
    """A step does not return, whether the watchdog has noticed it or not. Callers that wait for
    weights or for a pause get the error, too. The engine's thread stays until the step returns."""
    pool = make(step_timeout=step_timeout, warmup="sequential")
    with callers() as executor, hanging(faults.hang_in_step(pool, 1)) as hang:
        # Many requests, so that the other engine does not finish them before the pool is closed.
        prompts = PROMPTS * 4
        calls = [executor.submit(pool.generate_all, input_ids=prompts, sampling_params=LONG)]
        assert hang.begun.wait(SECONDS)
        if step_timeout is not None:
            until(lambda: state(pool, 1) == "abandoned")
        calls += [
            executor.submit(pool.update_weights, weights(pool)),
            executor.submit(pool.pause_generation),
        ]
        closed_in_time(pool)
        closed_in_time(pool)
        assert_pool_closed_for(calls)
        until(lambda: threads(pool) == [f"{pool.name}-engine-1"])
        hang.set()
        until(lambda: not threads(pool))


def test_while_calls_wait_for_an_update(make: Callable[..., EnginePool]) -> None:
    """The update waits for its source, which gives no tensor. Calls that change the pool wait for
    the update. They get the error, and an engine's own call does not keep `close` from ending."""
    pool = make()
    begun, go_on = threading.Event(), threading.Event()

    def source() -> Iterator[Any]:
        begun.set()
        assert go_on.wait(SECONDS)
        yield from ()

    with callers() as executor:
        try:
            update = executor.submit(pool.update_weights, source())
            assert begun.wait(SECONDS)
            calls = [
                executor.submit(pool.engines[0].pause_generation),
                executor.submit(pool.flush_cache),
            ]
            until(lambda: any(name.endswith("portal") for name in threads(pool)))
            closed_in_time(pool)
            assert_pool_closed_for(calls)
        finally:
            go_on.set()
        with pytest.raises(InvalidWeights):  # its source had nothing
            update.result(MOST)
    assert threads(pool) == []


def test_second_close_has_its_own_deadline(make: Callable[..., EnginePool]) -> None:
    """A caller with a short deadline does not wait for another one's long deadline."""
    pool = make()
    with callers() as executor, hanging(faults.hang_in_step(pool, 1)) as hang:
        calls = [executor.submit(pool.generate_all, input_ids=PROMPTS, sampling_params=LONG)]
        assert hang.begun.wait(SECONDS)
        first = executor.submit(pool.close, None)
        until(lambda: pool.closed)
        closed_in_time(pool)
        assert not first.done()
        hang.set()
        first.result(MOST)
        assert_pool_closed_for(calls)
    assert threads(pool) == []


def test_while_an_engine_is_reset(make: Callable[..., EnginePool]) -> None:
    """`close` does not wait for a reset that does not return."""
    pool = make()
    with callers() as executor, hanging(faults.hang_in_reset(pool, 1)) as hang:
        calls = load(pool, executor)
        pool.engines[0].pause_generation("in_place")  # or its requests might end before
        faults.raise_in_step(pool, 1)
        until(lambda: state(pool, 1) == "resetting")
        closed_in_time(pool)
        assert_pool_closed_for(calls)
        until(lambda: threads(pool) == [f"{pool.name}-engine-1"])
        hang.set()
        until(lambda: not threads(pool))


def test_while_an_engine_is_rebuilt(
    make: Callable[..., EnginePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With enough time, `close` returns when the rebuild is done and the engine's thread has
    ended."""
    pool = make()
    rebuild, begun, go_on = Assembly.rebuild, threading.Event(), threading.Event()

    def late(self: Assembly, *, dummy_weights: bool) -> None:
        begun.set()
        assert go_on.wait(SECONDS)
        rebuild(self, dummy_weights=dummy_weights)

    monkeypatch.setattr(Assembly, "rebuild", late)
    with callers() as executor:
        calls = load(pool, executor)
        pool.engines[0].pause_generation("in_place")  # or its requests might end before
        faults.raise_in_reset(pool, 1)
        faults.raise_in_step(pool, 1)
        assert begun.wait(SECONDS)
        assert state(pool, 1) == "rebuilding"
        closing = executor.submit(pool.close, SECONDS)
        until(lambda: pool.closed)
        go_on.set()
        closing.result(SECONDS)
        assert threads(pool) == []
        assert_pool_closed_for(calls)


def test_while_engines_drain_for_a_swap(make: Callable[..., EnginePool]) -> None:
    """The update gets PoolClosed, too."""
    pool = make()
    with callers() as executor:
        calls = load(pool, executor)
        with hanging_in_steps(pool) as hangs:
            until(lambda: all_hang(hangs))
            calls.append(executor.submit(pool.update_weights, weights(pool)))
            until(lambda: has_jobs(pool))  # it has staged
            # They hang in a later step again, so that requests do not end before the pool closes.
            with hanging_in_steps(pool, at=3) as again:
                let_go(hangs)
                until(lambda: all_hang(again))
                assert state(pool, 0) == "draining"
                closing = executor.submit(pool.close, SECONDS)
                until(lambda: pool.closed)
        closing.result(SECONDS)
        assert threads(pool) == []
        assert_pool_closed_for(calls)


def test_in_the_commit_of_a_swap(make: Callable[..., EnginePool]) -> None:
    """An engine does not return from putting new weights in place. `close` does not wait for it,
    and the update gets an error at once."""
    pool = make()
    with callers() as executor, hanging(faults.hang_in_commit(pool, 1)) as hang:
        calls = load(pool, executor)
        calls.append(executor.submit(pool.update_weights, weights(pool), mode="retract"))
        assert hang.begun.wait(SECONDS)
        until(lambda: sum(not call.done() for call in calls[:-1]) == unfinished_calls(pool))
        wait = [call for call in calls if not call.done()]  # some may have ended before
        assert calls[-1] in wait
        closed_in_time(pool)
        assert_pool_closed_for(wait)
        until(lambda: threads(pool) == [f"{pool.name}-engine-1"])
        hang.set()
        until(lambda: not threads(pool))


class Meanwhile(dict[str, Any]):
    """Arrays. When they are first looked at, something happens."""

    then: Callable[[], None]

    def items(self) -> Any:
        self.then()
        return super().items()


@pytest.mark.parametrize("of", ["weights", "adapter"])
def test_while_a_source_is_read(
    make: Callable[..., EnginePool], model_dir: Callable[[str], Path], of: str
) -> None:
    """The engine that would say what fits is gone then."""
    pool = make(**LORA)
    if of == "weights":
        source = Meanwhile(leaves(model_dir("qwen3")))
        update: Callable[[], Any] = lambda: pool.update_weights(source)  # noqa: E731
    else:
        source = Meanwhile(random_adapter(model_dir("qwen3"), 0))
        update = lambda: pool.load_lora_adapter("x", source, config_dict=config(4))  # noqa: E731
    source.then = lambda: closed_in_time(pool, SECONDS)
    with pytest.raises(PoolClosed):
        update()
    assert pool.closed


@pytest.mark.slow
def test_processes(model_dir: Callable[[str], Path]) -> None:
    """The program ends under load, with an engine stuck, or by Control-C inside `with`. The
    process ends by itself with its own exit code, and waiting callers get an error."""
    names = ["end-under-load", "end-while-stuck", "interrupted-in-with"]
    options = json.dumps(SMALL | {"warmup": "none"})
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-P", SCRIPT, name, model_dir("qwen3"), options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    }
    try:
        interrupted = processes["interrupted-in-with"]
        assert interrupted.stdout is not None
        assert interrupted.stdout.readline() == "generating\n"
        interrupted.send_signal(signal.SIGINT)
        out, err = interrupted.communicate(timeout=SECONDS)
        assert interrupted.returncode in (-signal.SIGINT, 130), err
        assert out.split("\n") == ["PoolClosed", "PoolClosed", "left: []", ""]
        assert err.rstrip().endswith("KeyboardInterrupt")
        for name in names[:2]:
            out, err = processes[name].communicate(timeout=SECONDS)
            word, *answers = out.split()
            assert (processes[name].returncode, word, err) == (0, "generating", ""), name
            assert set(answers) <= {"PoolClosed"}, name
    finally:
        for process in processes.values():
            process.kill()
