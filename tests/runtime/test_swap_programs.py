"""A thread compiles the programs of the first swap once the engines serve."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import pytest

from enginepool import EnginePool, toy
from enginepool.engine.executable_cache import ExecutableCache
from enginepool.runtime import startup, swap_programs
from enginepool.runtime.runtime import Runtime
from enginepool.weights import converters
from enginepool.weights.fingerprint import weighted_sums
from tests.support.layouts import tensors
from tests.support.liveness import SECONDS, callers
from tests.support.marks import slow
from tests.support.pools import SMALL, compilations

GREEDY = {"temperature": 0, "max_new_tokens": 4}


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Programs that earlier tests compiled for swaps are dropped."""
    converters.program.cache_clear()
    weighted_sums.clear_cache()


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch, one_cache: ExecutableCache) -> None:
    """Pools compile ahead, as they do for users."""

    def make_runtime(config: Any, name: str) -> Runtime:
        return Runtime(config, name, one_cache)

    monkeypatch.setattr(EnginePool, "make_runtime", staticmethod(make_runtime))


@pytest.fixture
def opened(ahead: None) -> Iterator[Any]:
    pools = []

    def make(devices: int = 1, **options: Any) -> EnginePool:
        pools.append(EnginePool(str(toy.checkpoint()), devices=devices, **(SMALL | options)))
        return pools[-1].open()

    yield make
    for pool in pools:
        pool.close()


def on_a_device(params: dict[str, Any]) -> dict[str, Any]:
    return jax.device_put(params, jax.devices()[0])


def thread_of(pool: EnginePool) -> list[threading.Thread]:
    name = f"{pool.name}-swap-programs"
    return [thread for thread in threading.enumerate() if thread.name == name]


@pytest.mark.parametrize("source", [on_a_device, dict], ids=["on a device", "NumPy"])
@pytest.mark.parametrize("load_format", ["auto", *slow("dummy")])
def test_first_swap_compiles_nothing(opened: Any, source: Callable[..., Any], load_format: str):
    """If the source has the checkpoint's names, shapes and dtypes; also for engines with dummy
    weights."""
    pool = opened(2, load_format=load_format)
    assert runtime(pool).swap_programs.join(SECONDS)
    params = source(tensors(toy.checkpoint("subtract")))
    with compilations() as compiled:
        pool.update_weights(params)
    assert compiled == []
    assert pool.generate("12+7=", GREEDY)["text"] == "5"


def runtime(pool: EnginePool) -> Runtime:
    found = pool._open_runtime
    assert found is not None
    return found


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, list[int]]]:
    """The thread waits before its first batch for the event. Also counts the batches that it
    compiled."""
    go, batches = threading.Event(), []
    put = swap_programs.put

    def holding(*args: Any, **kwargs: Any) -> Any:
        batches.append(len(batches))
        assert go.wait(SECONDS)
        return put(*args, **kwargs)

    monkeypatch.setattr(swap_programs, "put", holding)
    yield go, batches
    go.set()


@pytest.mark.parametrize("call", ["update", "close"])
def test_what_waits_for_the_compiling_thread(opened: Any, held: Any, call: str):
    """Opening and generation do not wait for the thread. A swap and `close` wait for the batch
    that it compiles, and it skips the rest."""
    go, batches = held
    pool = opened()
    assert pool.generate("12+7=", GREEDY)["text"] == "19"
    programs = runtime(pool).swap_programs
    source = toy.checkpoint("subtract")
    with callers(1) as executor:
        job = pool.close if call == "close" else partial(pool.update_weights, source)
        done = executor.submit(job)
        assert programs._stopping.wait(SECONDS)
        assert not programs.join(0)
        assert not done.done()
        go.set()
        done.result(SECONDS)
    assert len(batches) == 1
    assert thread_of(pool) == []
    if call == "update":
        assert pool.generate("12+7=", GREEDY)["text"] == "5"


@pytest.mark.filterwarnings("ignore:.*dropped without close:ResourceWarning")
def test_dropped_on_the_thread(ahead: None, monkeypatch: pytest.MonkeyPatch):
    """The garbage collector may run on it, and close a pool that was dropped."""
    others, go, put = startup._open_pools, threading.Event(), swap_programs.put

    def dropping(*args: Any, **kwargs: Any) -> Any:
        assert go.wait(SECONDS)
        pools.clear()
        return put(*args, **kwargs)

    monkeypatch.setattr(swap_programs, "put", dropping)
    pools = [EnginePool(str(toy.checkpoint()), devices=1, **SMALL)]
    programs = runtime(pools[0].open()).swap_programs
    go.set()
    assert programs.join(SECONDS)
    assert startup._open_pools == others


def test_error(opened: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """It is logged, and the pool works without the programs."""
    caplog.set_level("INFO", "enginepool")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no room for a program")

    monkeypatch.setattr(swap_programs, "put", fail)
    pool = opened()
    assert runtime(pool).swap_programs.join(SECONDS)
    errors = [getattr(record, "error", "") for record in caplog.records]
    assert any("no room for a program" in error for error in errors)
    pool.update_weights(toy.checkpoint("subtract"))
    assert pool.generate("12+7=", GREEDY)["text"] == "5"


def test_without_warm_up(opened: Any):
    """Nothing is compiled ahead."""
    pool = opened(warmup="none")
    assert thread_of(pool) == []
