"""The driver of a pool on many hosts, without a host: closing, and slow readers."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from enginepool import InvalidRequest, PoolClosed, PoolFailed  # noqa: E402
from enginepool.ray import RayEnginePool  # noqa: E402
from enginepool.ray.fleet import Fleet  # noqa: E402
from enginepool.ray.link import HostLink  # noqa: E402
from enginepool.ray.wire import Weights  # noqa: E402
from tests.support.liveness import SECONDS, callers  # noqa: E402
from tests.support.ray_calls import ray_call  # noqa: E402

CLOSED = PoolClosed("the pool was closed")


def test_a_closed_fleet_takes_no_work() -> None:
    """Neither before its loop has ended nor afterwards."""
    fleet = Fleet([], None)
    fleet.close(CLOSED)
    for ended in (False, True):
        if ended:
            fleet.end_loop()
        with pytest.raises(PoolClosed):
            fleet.run(asyncio.sleep(0))
        with pytest.raises(PoolClosed):
            fleet.post(fleet.router.submit, ray_call(1))


def test_work_that_comes_while_a_fleet_closes() -> None:
    """It is refused, or it ends."""

    def run(fleet: Fleet, barrier: threading.Barrier) -> None:
        barrier.wait(SECONDS)
        with pytest.raises(PoolClosed):
            fleet.run(asyncio.sleep(10 * SECONDS))

    def submit(fleet: Fleet, barrier: threading.Barrier) -> None:
        call = ray_call(1)
        barrier.wait(SECONDS)
        try:
            fleet.post(fleet.router.submit, call)
        except PoolClosed:
            return
        assert call.done.wait(SECONDS)
        with pytest.raises(PoolClosed):
            call.results()

    with callers(2) as executor:
        for _ in range(100):
            fleet, barrier = Fleet([], None), threading.Barrier(3)
            work = [executor.submit(each, fleet, barrier) for each in (run, submit)]
            barrier.wait(SECONDS)
            fleet.close(CLOSED)
            fleet.end_loop()
            for each in work:
                each.result(SECONDS)


class WithoutHosts(RayEnginePool):
    def _make_actors(self) -> list[Any]:
        return []


class ClosesPool:
    """The pool's lock. Another thread closes the pool as soon as the lock is free."""

    def __init__(self, pool: RayEnginePool) -> None:
        self._pool: RayEnginePool | None = pool
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        pool, self._pool = self._pool, None
        if pool is not None:
            closing = threading.Thread(target=pool.close)
            closing.start()
            closing.join(SECONDS)


def test_a_pool_is_closed_when_its_first_call_has_opened_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "is_initialized", iter([True, False]).__next__)
    pool = WithoutHosts(hosts=1)
    monkeypatch.setattr(pool, "_lock", ClosesPool(pool))
    with pytest.raises(PoolClosed):
        pool.generate_all("1+1=")
    assert pool.closed


def test_an_adapter_without_a_name_is_not_unloaded() -> None:
    """None is the base: hosts that come back would not get its weights."""
    fleet = Fleet([], None)
    fleet.updated(Weights(1, 1, "path", {"strict": True, "copy": False}))
    for name in (None, ["x"]):
        with pytest.raises(InvalidRequest, match="no such adapter"):
            fleet.run(fleet.unload(name))
    assert len(fleet.updates) == 1
    fleet.close(CLOSED)
    fleet.end_loop()


def test_a_slow_reader_of_a_stream_gets_the_end_once() -> None:
    """Reports that it has not read yet count once, with the newest result."""
    call = ray_call(1, every=True)
    (output,) = call.outputs
    for tokens in (1, 2):
        output.gain({"output_ids": [7] * tokens})
        call.show(output)
    news = WithoutHosts(hosts=1)._news(call, None)
    assert next(news) == (output, {"output_ids": [7, 7]})
    output.gain({"output_ids": [7] * 3})
    call.show(output)
    end = {"output_ids": [7] * 4, "meta_info": {}}
    call.finish(output, end)
    assert list(news) == [(output, end)]


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayEnginePool]:
    """A pool whose only host does not serve yet."""
    monkeypatch.setattr(ray, "is_initialized", iter([True, False]).__next__)
    with WithoutHosts(hosts=1) as pool:
        pool.fleet.hosts.append(HostLink(0, None, None))
        yield pool


def test_a_time_limit_while_no_host_serves(starting: RayEnginePool) -> None:
    with pytest.raises(PoolFailed, match=r"within timeout=0\.1 seconds; nothing has started"):
        starting.generate_all("1+1=", timeout=0.1)


def test_more_tasks_than_threads_wait_while_a_pool_closes(starting: RayEnginePool) -> None:
    """Each waits in a thread. Closing needs one as well."""

    async def main() -> None:
        tasks = [asyncio.create_task(starting.async_generate_all("1+1=")) for _ in range(50)]
        await asyncio.sleep(0)
        async with asyncio.timeout(SECONDS):
            await starting.aclose()
        for task in tasks:
            with pytest.raises(PoolClosed):
                await task

    asyncio.run(main())


def test_the_garbage_collector_closes_an_iterator_anywhere(starting: RayEnginePool) -> None:
    """Also where this thread gives the fleet work."""
    call = ray_call(1, every=True)
    (output,) = call.outputs
    output.gain({"output_ids": [7], "meta_info": {}})
    call.show(output)
    iterator = starting._stream(call, None)
    assert next(iterator)["output_ids"] == [7]

    def collect() -> None:
        with starting.fleet._gate:
            iterator.close()

    collecting = threading.Thread(target=collect, daemon=True)
    collecting.start()
    collecting.join(SECONDS)
    assert not collecting.is_alive()
    assert call.done.wait(SECONDS)
