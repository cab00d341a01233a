"""How many requests may wait, and what happens to calls beyond that."""

from collections.abc import Callable
from threading import Thread

import pytest

from enginepool import QueueFull
from enginepool.config import PoolConfig
from enginepool.dispatch.condition import DesiredState, EngineCondition
from enginepool.dispatch.dispatch import Dispatch
from enginepool.dispatch.queue import RequestQueue
from enginepool.dispatch.queue_limit import QueueLimit, WhenFull
from enginepool.dispatch.request import Call, Request
from enginepool.dispatch.steering_lock import SteeringLock
from tests.support.liveness import SECONDS, callers, paused, until, waiting
from tests.support.pools import MakePool


def make_call(count: int) -> Call:
    call = Call()
    for _ in range(count):
        call.add(Request(call, [1, 2, 3], None))
    return call


def limited(limit: int | None, when_full: WhenFull = "block") -> tuple[RequestQueue, QueueLimit]:
    queue = RequestQueue()
    queue.attach(0, EngineCondition(), lambda: 0, lambda: None)
    return queue, QueueLimit(queue, limit, when_full)


def take(queue: RequestQueue, room: int) -> list[Request]:
    return queue.take(0, load=0, room=room, cached=lambda request: 0)


def test_calls_wait_their_turn() -> None:
    """A call enters when all of its requests fit. Calls enter in the order in which they came: a
    small one does not overtake a large one."""
    queue, gate = limited(4)
    first, large, small = make_call(3), make_call(4), make_call(1)
    for call in (first, large, small):
        gate.enter(call)
    assert (len(queue), len(gate)) == (3, 5)
    assert take(queue, 2) == first.requests[:2]
    assert (len(queue), len(gate)) == (1, 5)
    assert take(queue, 1) == first.requests[2:]
    assert (len(queue), len(gate)) == (4, 1)
    assert take(queue, 4) == large.requests
    assert take(queue, 4) == small.requests


def test_a_call_beyond_the_limit_enters_an_empty_queue() -> None:
    queue, gate = limited(2)
    call = make_call(5)
    gate.enter(call)
    assert take(queue, 5) == call.requests


def test_refusal() -> None:
    """The error names the numbers and the remedy. The queue stays as it was."""
    queue, gate = limited(4, "raise")
    gate.enter(make_call(3))
    with pytest.raises(
        QueueFull, match=r"3 requests wait and this call has 2: at most max_queued=4"
    ):
        gate.enter(make_call(2))
    gate.enter(make_call(1))
    assert (len(queue), len(gate)) == (4, 0)


def test_a_call_that_ended_outside_does_not_enter() -> None:
    queue, gate = limited(1)
    first, left, last = make_call(1), make_call(1), make_call(1)
    for call in (first, left, last):
        gate.enter(call)
    (request,) = left.requests
    assert gate.holds(request)
    request.abort_reason = {"type": "abort"}
    left.finish(request, request.abort_reason)
    assert take(queue, 1) == first.requests
    assert take(queue, 1) == last.requests


class TakenMeanwhile(RequestQueue):
    """An engine takes all requests on a thread of its own just after the next look at the queue's
    length. The look goes on when the engine has done that, or waits for the limit's lock."""

    engine: Thread | None = None

    def __len__(self) -> int:
        found = super().__len__()
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.start()
            engine.join(0.3)
        return found


def test_the_last_request_is_taken_while_a_call_finds_the_queue_full() -> None:
    """Nothing else will leave the queue, so this is the call's only chance to enter."""
    queue = TakenMeanwhile()
    queue.attach(0, EngineCondition(), lambda: 0, lambda: None)
    gate = QueueLimit(queue, 1, "block")
    first, second = make_call(1), make_call(1)
    gate.enter(first)
    queue.engine = engine = Thread(target=take, args=(queue, 1))
    gate.enter(second)
    engine.join(SECONDS)
    assert take(queue, 1) == second.requests
    assert len(gate) == 0


class FullWhileDrained(RequestQueue):
    """A call finds the queue full, just before all requests are taken out."""

    then: Callable[[], None]

    def drain(self) -> list[Request]:
        self.then()
        return super().drain()


def test_the_queue_is_drained_while_a_call_finds_it_full() -> None:
    """The call enters. Nothing else will leave the queue."""
    queue = FullWhileDrained()
    queue.attach(0, EngineCondition(), lambda: 0, lambda: None)
    dispatch = Dispatch("pool", PoolConfig("toy"), DesiredState(), SteeringLock())
    dispatch.queue, dispatch.queue_limit = queue, QueueLimit(queue, 1, "block")
    first, second = make_call(1), make_call(1)
    dispatch.queue_limit.enter(first)
    queue.then = lambda: dispatch.queue_limit.enter(second)
    assert dispatch.take_waiting() == first.requests
    assert take(queue, 1) == second.requests


def test_a_call_behind_one_that_is_taken_out_enters() -> None:
    """The call before it was for one engine, which is out, and was too large for the queue."""
    queue, gate = limited(2)
    first, large, last = make_call(1), make_call(2), make_call(1)
    for request in large.requests:
        request.pinned_to = 1
    for call in (first, large, last):
        gate.enter(call)
    assert gate.take_pinned_to(1) == large.requests
    assert take(queue, 2) == [*first.requests, *last.requests]


def test_in_a_pool(make_pool: MakePool) -> None:
    """Waiting calls count as waiting, time out, and are answered in the end."""
    pool = make_pool("qwen3", 1, max_queued=2)
    params = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
    with callers(3) as executor:
        with paused(pool):
            calls = [
                executor.submit(pool.generate_all, input_ids=[[65, 66]] * 2, sampling_params=params)
                for _ in range(3)
            ]
            until(lambda: waiting(pool) == 6)
            assert "6 waiting" in repr(pool)
            (late,) = pool.generate_all(input_ids=[[65]], sampling_params=params, timeout=0.2)
            assert late["meta_info"]["finish_reason"]["err_type"] == "timeout"
        for call in calls:
            assert [len(r["output_ids"]) for r in call.result(SECONDS)] == [4, 4]
    assert waiting(pool) == 0


class EnteredMeanwhile(RequestQueue):
    """A request has left just before the queue is drained. Another thread says so afterwards."""

    def drain(self) -> list[Request]:
        drained = super().drain()
        assert self.on_taken is not None
        self.on_taken()
        return drained


def test_a_call_enters_while_all_that_waits_is_taken_out() -> None:
    """It is taken out as well. Otherwise it would wait in the queue of a pool without engines."""
    dispatch = Dispatch("pool", PoolConfig("toy"), DesiredState(), SteeringLock())
    dispatch.queue = EnteredMeanwhile()
    dispatch.queue_limit = QueueLimit(dispatch.queue, 1, "block")
    first, second = make_call(1), make_call(1)
    for call in (first, second):
        dispatch.queue_limit.enter(call)
    assert set(dispatch.take_waiting()) == {*first.requests, *second.requests}
    assert dispatch.waiting == 0


@pytest.mark.parametrize("aborted", [1, 2])
def test_a_call_in_front_of_the_queue_is_aborted(make_pool: MakePool, aborted: int) -> None:
    """What is left of it enters if it fits now, and so does the call behind it. Nothing leaves the
    queue meanwhile, because its only request waits for a paused engine."""
    pool = make_pool("qwen3", 2, max_queued=2)
    params = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
    paused_engine = pool.engines[1]
    with callers(3) as executor:
        paused_engine.pause_generation("in_place")
        try:
            pinned = executor.submit(paused_engine.generate, input_ids=[65], sampling_params=params)
            until(lambda: waiting(pool) == 1)
            calls = []
            for prompts in (2, 1):
                before = waiting(pool)
                calls.append(
                    executor.submit(
                        pool.generate_all, input_ids=[[65, 66]] * prompts, sampling_params=params
                    )
                )
                until(lambda before=before, prompts=prompts: waiting(pool) == before + prompts)
            large = [r for r in pool.runtime.dispatch.unfinished() if len(r.call.requests) == 2]
            for request in large[:aborted]:
                pool.abort_request(request.shown_rid)
            results = [result for call in calls for result in call.result(SECONDS)]
            assert not pinned.done()
        finally:
            paused_engine.continue_generation()
        assert len(pinned.result(SECONDS)["output_ids"]) == 4
    counts = [len(result["output_ids"]) for result in results]
    assert counts == [*[0] * aborted, *[4] * (3 - aborted)]
