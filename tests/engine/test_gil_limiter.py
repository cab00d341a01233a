"""The limit on engines that run Python. Engines get slots in order, and none waits for one that
hangs."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

import jax
import pytest

from enginepool.engine.executable_cache import ExecutableCache
from enginepool.engine.gil_limiter import Limiter, process_limiter
from tests.support import faults
from tests.support.liveness import SECONDS, at_rest, until
from tests.support.pools import MakePool


class Taker:
    """A thread that acquires a slot and keeps it until `end`."""

    def __init__(self, those: Limiter, inside: Callable[[], Any] = lambda: None) -> None:
        self.has = threading.Event()
        self.go_on = threading.Event()
        self._future: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(those, inside), daemon=True)
        self._thread.start()

    def _run(self, those: Limiter, inside: Callable[[], Any]) -> None:
        try:
            those.acquire()
            self.has.set()
            self.go_on.wait(SECONDS)
            inside()
            those.release()
            self._future.set_result(None)
        except BaseException as error:
            self._future.set_exception(error)

    def end(self) -> None:
        self.go_on.set()
        self._future.result(SECONDS)


# Longer than any test: no slot is ever overdue.
PATIENT = 1e6


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of an engine is overdue either."""
    monkeypatch.setattr(process_limiter(), "patience", PATIENT)


@pytest.fixture
def one_slot(patient: None) -> Iterator[None]:
    """Of the two slots that engines share, another thread has one."""
    taker = Taker(process_limiter())
    assert taker.has.wait(SECONDS)
    yield
    taker.end()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("at_once", [1, 2])
def test_so_many_at_a_time(at_once: int) -> None:
    those = Limiter(at_once, PATIENT)
    first = [Taker(those) for _ in range(at_once)]
    assert all(taker.has.wait(SECONDS) for taker in first)
    last = Taker(those)
    assert not last.has.wait(0.2)
    first[0].end()
    assert last.has.wait(SECONDS)
    for taker in (*first[1:], last):
        taker.end()


def test_no_thread_waits_for_one_that_hangs() -> None:
    """That thread has lost its slot. When it releases the slot later, no second slot appears."""
    those = Limiter(1, 0.01)
    hanging = Taker(those)
    assert hanging.has.wait(SECONDS)
    second = Taker(those)
    assert second.has.wait(SECONDS)
    hanging.end()
    second.end()
    those.patience = PATIENT
    first, last = Taker(those), Taker(those)
    assert first.has.wait(SECONDS) or last.has.wait(SECONDS)
    assert not (first.has.wait(0.2) and last.has.wait(0.2))
    for taker in (first, last):
        taker.go_on.set()
    first.end()
    last.end()


@pytest.mark.usefixtures("patient")
def test_a_wait_gives_the_slot_to_others_and_takes_it_back() -> None:
    those = Limiter(1, PATIENT)
    waiting, over = threading.Event(), threading.Event()

    def wait() -> None:
        with those.released():
            waiting.set()
            assert over.wait(SECONDS)

    first = Taker(those, wait)
    assert first.has.wait(SECONDS)
    first.go_on.set()
    assert waiting.wait(SECONDS)
    second = Taker(those)
    assert second.has.wait(SECONDS)
    over.set()
    with pytest.raises(TimeoutError):
        first._future.result(0.2)  # not before the second has ended its own
    second.end()
    first.end()


@pytest.mark.usefixtures("patient")
def test_a_wait_that_fails_leaves_no_slot_behind() -> None:
    those = Limiter(1, PATIENT)

    def wait() -> None:
        with those.released():
            raise KeyError("the device's")

    first = Taker(those, wait)
    with pytest.raises(KeyError):
        first.end()
    second = Taker(those)
    assert second.has.wait(SECONDS)
    second.end()


@pytest.fixture
def held(make_pool: MakePool) -> Iterator[tuple[Any, threading.Event, threading.Event]]:
    """Two engines. The first one's next wait for its device sets an event, and lasts until
    another is set."""
    pool = make_pool("toy", 2)
    waits, over = threading.Event(), threading.Event()
    scheduler: Any = pool.engines[0].scheduler_info["scheduler"]
    wait = scheduler.device_wait.until_ready

    class Slow:
        """A result that is not there yet."""

        def __init__(self, result: Any) -> None:
            self.result = result

        def is_ready(self) -> bool:
            return False

        def block_until_ready(self) -> None:
            waits.set()
            assert over.wait(SECONDS)
            self.result.block_until_ready()

    scheduler.device_wait.until_ready = lambda result: wait(Slow(result))
    yield pool, waits, over
    over.set()
    del scheduler.device_wait.until_ready


@pytest.mark.usefixtures("one_slot")
def test_an_engine_steps_while_another_waits_for_its_device(held: Any) -> None:
    pool, waits, over = held
    first, second = pool.engines
    params = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(first.generate, "1+1=", params)
        assert waits.wait(SECONDS)
        quick = threads.submit(second.generate, "1+1=", params)
        assert not wait_for([quick], SECONDS).not_done
        assert not slow.done()
        over.set()
        for answer in (quick, slow):
            assert answer.result(SECONDS)["meta_info"]["completion_tokens"] == 4


@pytest.mark.usefixtures("one_slot")
def test_an_engine_keeps_its_slot_until_it_waits_for_its_device(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's chunks are prefilled one after the other, beyond step boundaries."""
    pool = make_pool("qwen3", 2)
    until(lambda: at_rest(pool))
    those, acquired, waits = process_limiter(), 0, 0
    acquire, released = those.acquire, those.released

    def acquiring() -> None:
        nonlocal acquired
        acquired += 1
        acquire()

    def waiting() -> Any:
        nonlocal waits
        waits += 1
        return released()

    monkeypatch.setattr(those, "acquire", acquiring)
    monkeypatch.setattr(those, "released", waiting)
    before = pool.stats()["engines"][0]["steps"]
    engine: Any = pool.engines[0]
    engine.generate(input_ids=[9] * 150, sampling_params={"temperature": 0.0, "max_new_tokens": 1})
    until(lambda: at_rest(pool))
    assert pool.stats()["engines"][0]["steps"] > before + 2
    assert acquired == 1 + waits


def test_a_failed_step_keeps_no_slot(make_pool: MakePool) -> None:
    """An idle engine keeps none either."""
    pool = make_pool("toy", 2, restart=False)

    def failing(*args: Any, **kwargs: Any) -> Any:
        undo()
        raise ValueError("the test's")

    undo = faults.every_prefill(faults.scheduler_of(pool, 0), lambda _: failing)
    params = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
    pool.engines[1].pause_generation()  # otherwise it might run all requests
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(pool.generate_all, ["1+1="] * 8, params, timeout=SECONDS)
        until(lambda: pool.stats()["engines"][0]["state"] == "quarantined")
        pool.engines[1].continue_generation()
        results = call.result(SECONDS)
    assert [result["meta_info"]["completion_tokens"] for result in results] == [4] * 8
    those = process_limiter()
    taker = Taker(those)
    assert taker.has.wait(SECONDS)
    taker.end()


def test_engines_that_warm_up_together_trace_while_another_compiles() -> None:
    cache = ExecutableCache()
    cache.limiter.patience = PATIENT
    load_or_compile = cache.load_or_compile
    compiling, over = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        compiling.set()
        assert over.wait(SECONDS)
        return load_or_compile(*args)

    cache.load_or_compile = slow

    def warm_up() -> int:
        with cache.sharing(), cache.limiter.held():
            return int(jax.jit(lambda x: 3 * x)(14))

    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(warm_up)
        assert compiling.wait(SECONDS)
        tracing = Taker(cache.limiter)
        assert tracing.has.wait(SECONDS)
        over.set()
        with pytest.raises(TimeoutError):
            answer.result(0.2)
        tracing.end()
        assert answer.result(SECONDS) == 42
