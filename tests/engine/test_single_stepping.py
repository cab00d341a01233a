"""Engines that are to stop at the same time first launch one step at a time."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from enginepool import EnginePool
from enginepool.dispatch.condition import EngineCondition
from enginepool.engine.single_stepping import SingleStepping, one_step_at_a_time
from enginepool.engine.steady.decode import SteadyDecode
from enginepool.engine.steady.in_flight import StepsInFlight
from enginepool.engine.steady.pace import Pace
from tests.support.faults import scheduler_of
from tests.support.liveness import SECONDS, at_rest, callers, until
from tests.support.marks import steady_decode
from tests.support.pools import MakePool
from tests.support.steady import (
    LONG,
    LONGER,
    OPTIONS,
    PROMPTS,
    ask,
    ask_without_flush,
    decoding,
    several_at_once,
)


@pytest.fixture
def eight_at_once(make_pool: MakePool) -> Iterator[EnginePool]:
    """Two engines that launch eight steps at once."""
    with several_at_once():
        pool = make_pool("qwen3", 2, **OPTIONS | {"max_decode_steps": 8})
        pool.flush_cache()
        yield pool


def steppings(pool: EnginePool) -> list[SingleStepping]:
    return [worker.channel.single_stepping for worker in pool.runtime.workers]


def test_an_engine_in_flight_is_waited_for() -> None:
    """The block begins when at most one step is in flight."""
    one, other = SingleStepping(), SingleStepping()
    inside = threading.Event()

    def meet() -> None:
        with one_step_at_a_time([one, other]):
            inside.set()

    with one.steps_in_flight():
        one.in_flight(16)
        thread = threading.Thread(target=meet)
        thread.start()
        until(lambda: one.on and other.on)
        one.in_flight(8)
        assert not inside.wait(0.05)
        one.in_flight(1)
        thread.join(SECONDS)
    assert inside.is_set()


def test_no_engine_waits_for_one_that_hangs() -> None:
    hangs = SingleStepping()
    with hangs.steps_in_flight(), one_step_at_a_time([hangs]):
        assert hangs.on


def test_an_engine_whose_steps_have_ended_is_waited_for_no_longer() -> None:
    stepping = SingleStepping()

    def step() -> None:
        with stepping.steps_in_flight():
            stepping.begin()
            assert not stepping.wait(0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step()
    assert stepping.wait(0)


def test_it_ends_with_the_block() -> None:
    stepping = SingleStepping()
    with pytest.raises(ZeroDivisionError), one_step_at_a_time([stepping]):
        raise ZeroDivisionError
    assert not stepping.on


@steady_decode
def test_one_step_at_a_time(eight_at_once: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards launches have several steps again. That the device idles between single steps does
    not count for the pace."""
    pool, seen, counted = eight_at_once, list[tuple[bool, int, int]](), list[bool]()
    launch, launched = SteadyDecode._launch, Pace.launched

    def counting(self: Pace, *, idle: bool) -> None:
        counted.append(idle)
        launched(self, idle=idle)

    def launching(self: Any, in_flight: StepsInFlight) -> bool:
        begun, before = self._channel.single_stepping.on, in_flight.steps
        done = launch(self, in_flight)
        if done:
            seen.append((begun, before, in_flight.steps))
        return done

    monkeypatch.setattr(SteadyDecode, "_launch", launching)
    monkeypatch.setattr(Pace, "launched", counting)
    with callers() as executor:
        call = executor.submit(ask_without_flush, pool, LONGER, PROMPTS[:1])
        decoding(pool, 1)
        with one_step_at_a_time(steppings(pool)):
            start = len(seen)
            until(lambda: len(seen) > start + 1)
            before = len(counted)
            until(lambda: len(seen) > start + 4)
            during = seen[start + 1 :]
            assert len(counted) == before
        until(lambda: (False, 8, 16) in seen[start:])
        call.result(SECONDS)
    assert set(during) == {(True, 0, 1)}


@steady_decode
def test_no_step_is_launched_behind_a_prefill(
    eight_at_once: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the engine can stop as soon as the prefill has ended."""
    engine: Any = eight_at_once.engines[0]
    joined, behind = list[bool](), list[bool]()
    add_prefill, launch = StepsInFlight.add_prefill, StepsInFlight.launch

    def adding(self: StepsInFlight, prefill: Any) -> None:
        joined.append(True)
        add_prefill(self, prefill)

    def launching(self: StepsInFlight, steps: int) -> None:
        behind.append(self.prefill is not None)
        launch(self, steps)

    with callers() as executor:
        call = executor.submit(engine.generate, input_ids=PROMPTS[:2], sampling_params=LONGER)
        decoding(eight_at_once, 2)
        with one_step_at_a_time(steppings(eight_at_once)), monkeypatch.context() as patch:
            patch.setattr(StepsInFlight, "add_prefill", adding)
            patch.setattr(StepsInFlight, "launch", launching)
            engine.generate(input_ids=PROMPTS[2], sampling_params=LONG | {"max_new_tokens": 4})
        call.result(SECONDS)
    assert joined
    assert not any(behind)


@steady_decode
def test_no_engine_waits_for_an_idle_one(eight_at_once: EnginePool) -> None:
    pool = eight_at_once
    ask(pool, LONG)
    until(lambda: at_rest(pool))
    for stepping in steppings(pool):
        stepping.begin()
        assert stepping.wait(0)
        stepping.end()


@steady_decode
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_engines_that_swap_wait_for_a_step_and_not_for_many(
    eight_at_once: EnginePool,
    model_dir: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    mode: Any,
) -> None:
    """At most one step is in flight when an engine learns of the swap."""
    pool, landings, stood = eight_at_once, dict[int, int](), list[int]()
    look, pause = SteadyDecode._admit_waiting, EngineCondition.pause

    def looking(self: Any, in_flight: StepsInFlight) -> None:
        look(self, in_flight)
        if in_flight.closed:
            landings.setdefault(id(self._channel.condition), in_flight.steps)

    def pausing(self: Any, reason: Any) -> None:
        stood.append(id(self))
        pause(self, reason)

    leaves = scheduler_of(pool, 0).tp_worker.worker.model_runner.model_state_leaves
    staged = pool.stage_weights([jax.numpy.flip(leaf) for leaf in leaves], weight_version=1)
    with callers() as executor:
        call = executor.submit(ask_without_flush, pool, LONGER, PROMPTS[:4])
        decoding(pool, 4)
        monkeypatch.setattr(SteadyDecode, "_admit_waiting", looking)
        monkeypatch.setattr(EngineCondition, "pause", pausing)
        staged.commit(mode)
        call.result(SECONDS)
    pool.update_weights(model_dir("qwen3"), weight_version=0)
    assert set(landings) == set(stood[:2])
    assert max(landings.values()) <= 1
