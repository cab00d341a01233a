"""Engines that are to stand together step one by one before they do."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks.faults import scheduler_of
from enginepool.engine.approach import Approach, together
from enginepool.engine.condition import EngineCondition
from enginepool.engine.steady.decode import SteadyDecode
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
    flying,
    several_at_once,
)


def test_an_engine_that_generates_is_waited_for() -> None:
    """Until what it has dispatched at once is there, and the block with it."""
    one, other = Approach(), Approach()
    one.on_their_way(8)
    inside = threading.Event()

    def meet() -> None:
        with together([one, other]):
            inside.set()

    thread = threading.Thread(target=meet)
    thread.start()
    assert not inside.wait(0.05)
    assert one.begun
    assert other.begun
    one.on_their_way(1)
    thread.join(SECONDS)
    assert inside.is_set()


def test_nobody_waits_for_an_engine_that_hangs() -> None:
    hangs = Approach()
    hangs.on_their_way(8)
    with together([hangs]):
        assert hangs.begun


def test_it_ends_with_the_block() -> None:
    approach = Approach()
    with pytest.raises(ZeroDivisionError), together([approach]):
        raise ZeroDivisionError
    assert not approach.begun


@steady_decode
def test_nobody_waits_for_an_engine_at_rest(make_pool: MakePool) -> None:
    """However many steps it had on their way when its last request ended: by a stop id, long before
    it had to."""
    with several_at_once():
        pool = make_pool("qwen3", 2, **OPTIONS | {"max_decode_steps": 8})
        sampled = LONG | {"temperature": 1.0, "sampling_seed": 1}
        (result,) = ask(pool, sampled, PROMPTS[:1])
        ids = result["output_ids"]
        stop = next(id for place, id in enumerate(ids) if place > 20 and id not in ids[:place])
        params = sampled | {"ignore_eos": False, "stop_token_ids": [stop]}
        (result,) = ask(pool, params, PROMPTS[:1])
    assert result["output_ids"] == ids[: ids.index(stop) + 1]
    until(lambda: at_rest(pool))
    assert all(worker.channel.approach.wait(0) for worker in pool._runtime().workers)


@steady_decode
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_engines_that_swap_wait_for_a_step_and_not_for_many(
    make_pool: MakePool,
    model_dir: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    mode: Any,
) -> None:
    """The last that an engine has on its way before it stands are single steps; many before, and
    afterwards."""
    seen: dict[int, list[int | str]] = {}
    dispatch, pause = SteadyDecode.dispatch, EngineCondition.pause

    def dispatching(self: Any, state: Any, batch: Any, steps: int) -> Any:
        seen.setdefault(id(self._channel.condition), []).append(steps)
        return dispatch(self, state, batch, steps)

    def pausing(self: Any, reason: Any) -> None:
        seen.setdefault(id(self), []).append(reason)
        pause(self, reason)

    with several_at_once():
        pool = make_pool("qwen3", 2, **OPTIONS | {"max_decode_steps": 8})
        pool.flush_cache()
        runner = scheduler_of(pool, 0).tp_worker.worker.model_runner
        staged = pool.stage_weights(
            [jax.numpy.flip(leaf) for leaf in runner.model_state_leaves], weight_version=1
        )
        with callers() as executor:
            call = executor.submit(ask_without_flush, pool, LONGER, PROMPTS[:4])
            flying(pool, 4)
            monkeypatch.setattr(SteadyDecode, "dispatch", dispatching)
            monkeypatch.setattr(EngineCondition, "pause", pausing)
            staged.commit(mode)
            call.result(SECONDS)
        pool.update_weights(model_dir("qwen3"), weight_version=0)
    assert len(seen) == 2
    for events in seen.values():
        stands = events.index("swap")
        assert events[:stands][-2:] == [1, 1]
        assert 8 in events[stands:]
