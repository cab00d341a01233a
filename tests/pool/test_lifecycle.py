"""A pool is opened, closed and dropped, fails to start, and is open when its process ends."""

import asyncio
import gc
import json
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import pytest

from enginepool import EnginePool, EngineStartFailed, InvalidConfig, InvalidWeights, PoolClosed
from tests.support.liveness import SECONDS, callers, until, waiting
from tests.support.marks import slow
from tests.support.pools import SMALL

LONG = {"temperature": 0.0, "max_new_tokens": 300, "ignore_eos": True}
SCRIPT = Path(__file__).parents[1] / "support" / "host_state_script.py"

MakeUnopened = Callable[..., EnginePool]


@pytest.fixture
def unopened(model_dir: Callable[[str], Path]) -> Any:
    """Makes pools without warm-up, which are not open yet. They are closed at the end."""
    pools = []

    def make(devices: int = 1, model: Path | None = None, **options: Any) -> EnginePool:
        pool = EnginePool(
            str(model or model_dir("qwen3")),
            devices=devices,
            **(SMALL | {"warmup": "none"} | options),
        )
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()


def engine_threads(pool: EnginePool) -> list[str]:
    """The thread of each engine, and the watchdog's."""
    return [t.name for t in threading.enumerate() if t.name.startswith(pool.name)]


def test_open_is_idempotent(unopened: MakeUnopened) -> None:
    """The constructor starts no thread. Opening twice, by `open`, by `with` and by a first call,
    makes one set of engines."""
    pool = unopened(2)
    assert engine_threads(pool) == []
    engines = pool.open().engines
    with pool as same:
        assert same is pool
        assert pool.open().engines == engines
        assert len(engine_threads(pool)) == 3
    assert pool.closed


def test_first_call_opens(unopened: MakeUnopened) -> None:
    """`open` is not needed. Threads that call first at the same time get the same engines."""
    pool = unopened()
    with callers(4) as executor:
        engines = [f.result() for f in [executor.submit(lambda: pool.engines) for _ in range(4)]]
    assert all(one == engines[0] for one in engines)
    assert len(engine_threads(pool)) == 2


def test_close_is_final(unopened: MakeUnopened) -> None:
    """After `close` every call raises PoolClosed, and so does opening. Closing again does
    nothing."""
    pool = unopened().open()
    engine = pool.engines[0]
    pool.close()
    pool.close()
    assert pool.closed
    assert engine_threads(pool) == []
    for use in (
        pool.open,
        pool.__enter__,
        lambda: pool.generate("a"),
        lambda: pool.generate_all(["a"]),
        lambda: pool.chat([{"role": "user", "content": "a"}]),
        lambda: pool.stream("a"),
        lambda: pool.as_completed("a"),
        lambda: pool.engines,
        lambda: pool.abort_request("a"),
        pool.pause_generation,
        pool.continue_generation,
        pool.flush_cache,
        pool.stats,
        pool.get_load,
    ):
        with pytest.raises(PoolClosed, match="already closed"):
            use()

    async def asynchronously() -> None:
        with pytest.raises(PoolClosed, match="already closed"):
            await pool.async_generate("a")
        with pytest.raises(PoolClosed, match="already closed"):
            async with pool:
                pass
        await pool.aclose()

    anyio.run(asynchronously)
    with pytest.raises(Exception, match="closed"):
        engine.generate("a", sampling_params={})


def test_close_before_open(unopened: MakeUnopened) -> None:
    """A pool that was never opened can be closed, and stays closed."""
    pool = unopened()
    pool.close()
    with pytest.raises(PoolClosed):
        pool.open()


def test_close_right_after_the_first_call_has_opened(unopened: MakeUnopened) -> None:
    """Another thread's `close` has waited for the opening. The call raises PoolClosed."""
    pool = unopened()
    lock = pool._lock

    @contextmanager
    def closed_next() -> Iterator[None]:
        with lock:
            yield
        pool._lock = lock
        with callers(1) as other:
            other.submit(pool.close).result(SECONDS)

    pool._lock = closed_next()
    with pytest.raises(PoolClosed, match="already closed"):
        pool.generate("a")


def test_close_from_several_threads(unopened: MakeUnopened) -> None:
    """When `close` returns to any caller, everything has been freed."""
    pool = unopened(2).open()
    barrier = threading.Barrier(4)

    def close() -> list[str]:
        barrier.wait()
        pool.close()
        return engine_threads(pool)

    with callers(4) as executor:
        assert [f.result() for f in [executor.submit(close) for _ in range(4)]] == [[]] * 4


def test_close_while_calls_wait(unopened: MakeUnopened) -> None:
    """Waiting callers get PoolClosed at once: with running or queued requests, in threads, on an
    event loop or between two chunks."""
    pool = unopened().open()
    started = pool.stream(input_ids=[65] * 8, sampling_params=LONG)
    next(started)
    pool.pause_generation("in_place")

    async def on_a_loop() -> None:
        await pool.async_generate(input_ids=[66] * 8, sampling_params=LONG)

    with callers() as executor:
        calls = [
            executor.submit(pool.generate, input_ids=[67] * 8, sampling_params=LONG),
            executor.submit(asyncio.run, on_a_loop()),
            executor.submit(lambda: list(pool.as_completed(input_ids=[[68]] * 2))),
        ]
        until(lambda: waiting(pool) == 4)
        pool.close()
        for call in calls:
            with pytest.raises(PoolClosed, match="was closed"):
                call.result(SECONDS)
        with pytest.raises(PoolClosed, match="was closed"):
            list(started)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_async_with(unopened: MakeUnopened, backend: str) -> None:
    """`async with` opens and closes on asyncio and trio. The event loop runs on meanwhile."""
    pool = unopened()

    async def main() -> str:
        async with pool:
            assert len(engine_threads(pool)) == 2
            stats = pool.stats()
        assert pool.closed
        return stats["engines"][0]["state"]

    assert anyio.run(main, backend=backend) == "serving"
    assert engine_threads(pool) == []


def test_under_a_running_loop(pool: EnginePool) -> None:
    """The sync calls of the pool and of an engine work while an event loop runs."""
    params = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True}

    async def main() -> None:
        ours = pool.generate(input_ids=[65, 66], sampling_params=params)
        theirs = pool.engines[1].generate(input_ids=[65, 66], sampling_params=params)
        assert ours["output_ids"] == theirs["output_ids"]

    asyncio.run(main())


def test_dropped_pool_closes_itself(unopened: MakeUnopened, model_dir: Any) -> None:
    """A pool without references gives a ResourceWarning and ends its threads."""
    pool = EnginePool(str(model_dir("qwen3")), devices=1, warmup="none", **SMALL).open()
    name = pool.name
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        del pool
        gc.collect()
    (message,) = [str(w.message) for w in caught if w.category is ResourceWarning]
    assert name in message
    assert "without close()" in message
    assert not [t for t in threading.enumerate() if t.name.startswith(name)]


def test_closed_pool_drops_silently(model_dir: Any) -> None:
    """No warning for a pool that was closed, or never opened."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        pool = EnginePool(str(model_dir("qwen3")), devices=1, warmup="none", **SMALL)
        pool.open().close()
        del pool
        EnginePool(str(model_dir("qwen3")), devices=1)
        gc.collect()


def test_repr(unopened: MakeUnopened) -> None:
    """The repr has the state of the pool."""
    pool = unopened(2)
    assert repr(pool) == f"<EnginePool {pool.name!r} [not open yet]>"
    pool.open()
    shown = "2 of 2 engines serving | 0 running, 0 waiting"
    assert repr(pool) == f"<EnginePool {pool.name!r} [{shown}]>"
    pool.close()
    assert repr(pool) == f"<EnginePool {pool.name!r} [closed]>"


@pytest.mark.parametrize(
    ("model", "warmup"),
    [("qwen3", "sequential"), *slow(("qwen3_moe", "none"), ("gemma2", "none"))],
)
def test_close_gives_device_memory_back(
    unopened: MakeUnopened, model_dir: Callable[[str], Path], model: str, warmup: str
) -> None:
    """When `close` has returned, no array of the engines is left, even before a garbage collection.
    This holds for a pool that was warmed up and never used.

    The exception is a key of 8 bytes: JAX keeps it as a constant of its trace of upstream's
    sampler.
    """
    before = jax.live_arrays()  # held, so that no new array can have the id of one of these
    pool = unopened(3, model_dir(model), warmup=warmup)
    pool.generate("12+7=", {"max_new_tokens": 4}, return_logprob=True, top_logprobs_num=2)
    gc.disable()
    try:
        pool.close()
        known = {id(array) for array in before}
        left = [(a.shape, a.dtype) for a in jax.live_arrays() if id(a) not in known]
        assert left in ([], [((2,), jnp.uint32)])
    finally:
        gc.enable()


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_start_failure_of_a_later_engine(
    unopened: MakeUnopened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If engine 1 does not start, engine 0 is closed and its memory freed. The error names the
    device and the cause. The same pool opens once the cause is gone."""
    from sgl_jax.srt.model_executor.model_runner import ModelRunner

    initialize = ModelRunner.initialize

    def fail_on_device_1(self: Any) -> None:
        if any(device.id == 1 for device in self.mesh.devices.flat):
            raise MemoryError("device 1 is full")
        initialize(self)

    before = live_bytes()
    pool = unopened(3)
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "initialize", fail_on_device_1)
        with pytest.raises(
            EngineStartFailed, match=r"engine 1 on device \[1\] .*is full"
        ) as caught:
            pool.open()
    assert (caught.value.engine_index, caught.value.device_ids) == (1, (1,))
    assert isinstance(caught.value.__cause__, MemoryError)
    assert engine_threads(pool) == []
    assert not pool.closed
    caught.value.__cause__.__traceback__ = None  # it holds the frames of the failed build
    del caught
    assert live_bytes() == before
    assert len(pool.open().engines) == 3


def test_start_failure_in_warm_up(
    unopened: MakeUnopened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same holds if a built engine fails in its warm-up, with all engines starting at once. The
    log has the end once."""
    from sgl_jax.srt.managers.tp_worker import ModelWorker

    def fail(self: Any, *_: Any) -> None:
        raise RuntimeError("no program for this chip")

    caplog.set_level("INFO", "enginepool")
    pool = unopened(2, warmup="parallel")
    with monkeypatch.context() as patch:
        patch.setattr(ModelWorker, "run_precompile", fail)
        with pytest.raises(EngineStartFailed, match="no program for this chip"):
            pool.open()
    assert engine_threads(pool) == []
    assert [record.msg for record in caplog.records].count("enginepool.closed") == 1


def test_incomplete_model(unopened: MakeUnopened, tmp_path: Path, model_dir: Any) -> None:
    """A model directory without weights, and one that does not exist, give a clear error."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((model_dir("qwen3") / name).read_text())
    for model, error in ((tmp_path, InvalidWeights), (tmp_path / "nowhere", InvalidConfig)):
        pool = unopened(model=model)
        with pytest.raises(error, match=re.escape(str(model))):
            pool.open()
        assert engine_threads(pool) == []


def test_on_engine_reports(unopened: MakeUnopened) -> None:
    """`open` reports every engine that serves, in the form of `stats`."""
    seen: list[dict[str, Any]] = []
    pool = unopened(2).open(on_engine=seen.append)
    assert [engine["engine_index"] for engine in seen] == [0, 1]
    assert all(engine["state"] == "serving" for engine in seen)
    assert seen[0].keys() == pool.stats()["engines"][0].keys()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_that_never_close(model_dir: Callable[[str], Path]) -> None:
    """A script that does not close its pool ends by itself: with code 0 at its end, with code 1
    by an exception while another thread's call is in flight, with its own code by sys.exit."""
    endings = {"end": 0, "exception": 1, "exit": 3}
    options = json.dumps(SMALL | {"warmup": "none"})
    processes = {
        ending: subprocess.Popen(
            # -P: otherwise the folder tests/support comes before every package.
            [sys.executable, "-P", SCRIPT, f"leave-by-{ending}", model_dir("qwen3"), options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for ending in endings
    }
    deadline = time.monotonic() + 2 * SECONDS
    for ending, code in endings.items():
        process = processes[ending]
        try:
            out, err = process.communicate(timeout=deadline - time.monotonic())
        finally:
            process.kill()
        assert process.returncode == code, (ending, err)
        assert out.strip() == "serving", (ending, err)
        assert ("ValueError: the script's own" in err) == (ending == "exception")
        assert "Fatal" not in err, err
