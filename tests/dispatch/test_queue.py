"""The queue that engines pull from."""

from collections.abc import Callable
from functools import partial

import pytest

from enginepool.dispatch.condition import EngineCondition
from enginepool.dispatch.queue import RequestQueue
from enginepool.dispatch.request import Call, Request
from enginepool.dispatch.routing import MIN_SHARED_PREFIX


@pytest.fixture
def queue() -> RequestQueue:
    return RequestQueue()


def attach(queue: RequestQueue, *loads: int) -> list[int]:
    """Register engines that hold so many requests. Returns the list of engines that are woken,
    which grows."""
    woken: list[int] = []
    for engine, load in enumerate(loads):
        wake = partial(woken.append, engine)
        queue.attach(engine, EngineCondition(), lambda load=load: load, wake)
    return woken


def make(
    count: int, *, pinned_to: int | None = None, prompt: list[int] | None = None
) -> list[Request]:
    call = Call()
    for _ in range(count):
        call.add(Request(call, prompt or [1, 2, 3], None, pinned_to=pinned_to))
    return call.requests


def take(
    queue: RequestQueue,
    engine: int = 0,
    load: int = 0,
    room: int = 100,
    cached: Callable[[Request], int] = lambda request: 0,
    prefilling: bool = False,
) -> list[Request]:
    return queue.take(engine, load=load, room=room, cached=cached, prefilling=prefilling)


def test_oldest_first(queue: RequestQueue):
    """Each request is taken once."""
    attach(queue, 0)
    requests = make(3) + make(2)
    queue.put(requests)
    assert len(queue) == 5
    assert take(queue, room=2) == requests[:2]
    assert take(queue) == requests[2:]
    assert take(queue) == []
    assert len(queue) == 0


def test_resumed_requests_go_before_the_rest(queue: RequestQueue):
    """They hold the tokens of a caller who has waited longer."""
    attach(queue, 0)
    fresh, resumed = make(2), make(2)
    queue.put(fresh)
    queue.put(resumed, resumed=True)
    assert take(queue) == resumed + fresh


def test_pinned_requests_go_to_their_engine_only(queue: RequestQueue):
    """They go first there, also when they resume."""
    attach(queue, 0, 0)
    free, pinned = make(2), make(2, pinned_to=1)
    queue.put(free)
    queue.put(pinned[:1])
    queue.put(pinned[1:], resumed=True)
    assert take(queue, engine=0) == free[:1]
    assert take(queue, engine=1) == pinned
    assert take(queue, engine=0) == free[1:]


def test_an_engine_that_holds_more_than_its_share_gets_nothing(queue: RequestQueue):
    """The loads of the other engines are read at the moment of the choice."""
    attach(queue, 6, 0)
    queue.put(make(4))
    assert take(queue, engine=0, load=6) == []
    assert len(take(queue, engine=1)) == 4


def test_engines_that_take_nothing_have_no_share(queue: RequestQueue):
    """The engine that asks takes all that wait, beside an engine that is paused or drains. Engines
    that drain share what has begun."""
    attach(queue, 0)
    other = EngineCondition()
    queue.attach(1, other, lambda: 1, lambda: None)
    other.pause("paused")
    queue.put(make(2))
    assert len(take(queue, load=2)) == 2
    other.go_on("paused")
    other.draining = True
    queue.put(make(2))
    assert len(take(queue, load=2)) == 2
    begun = make(4)
    for request in begun:
        request.output_ids = [7]
    queue.put(begun, resumed=True)
    assert len(queue.take(0, load=2, room=9, cached=lambda _: 0, begun=True)) == 2


def test_an_engine_without_room_gets_nothing(queue: RequestQueue):
    """The requests that it might have taken stay in their order."""
    attach(queue, 0)
    requests = make(2)
    queue.put(requests)
    assert take(queue, room=0) == []
    assert take(queue) == requests


def test_put_wakes_every_engine(queue: RequestQueue):
    """Any engine with room may take the request."""
    woken = attach(queue, 0, 0, 0)
    queue.put(make(1))
    assert woken == [0, 1, 2]


def test_discard_wins_or_loses_against_an_engine(queue: RequestQueue):
    """`discard` returns True exactly when no engine can get the request any more."""
    attach(queue, 0, 0)
    first, second = make(2)
    (pinned,) = make(1, pinned_to=1)
    queue.put([first, second, pinned])
    assert queue.discard(first)
    assert not queue.discard(first)
    assert queue.discard(pinned)
    assert take(queue) == [second]
    assert not queue.discard(second)


def test_drain_takes_everything(queue: RequestQueue):
    """Resumed, new and pinned requests."""
    attach(queue, 0, 0)
    fresh, resumed, pinned = make(2), make(1), make(1, pinned_to=1)
    queue.put(fresh + pinned)
    queue.put(resumed, resumed=True)
    assert set(queue.drain()) == {*fresh, *resumed, *pinned}
    assert len(queue) == 0


def test_a_pinned_request_waits_for_its_detached_engine(queue: RequestQueue):
    """Such a request does not count when work is shared out."""
    attach(queue, 0, 0)
    pinned, free = make(2, pinned_to=1), make(4)
    queue.put(pinned + free)
    queue.detach(1)
    assert take(queue) == free


def test_engine_that_comes_back_gets_a_suspect_that_failed_on_the_others(queue: RequestQueue):
    """Even if another engine has begun to empty itself for the suspect, as the best engine there
    was."""
    attach(queue, 1, 1)
    (suspect,) = make(1)
    suspect.faults.runs_alone = True
    suspect.faults.reasons = {0: "failed", 1: "failed"}
    queue.put([suspect])
    assert take(queue, engine=0, load=1) == []
    queue.attach(2, EngineCondition(), lambda: 0, lambda: None)
    assert take(queue, engine=0) == take(queue, engine=1) == []
    assert take(queue, engine=2) == [suspect]


def test_a_suspect_that_starts_alone(queue: RequestQueue):
    """It comes without others, and first, as soon as the engine computes no other prompt.
    Requests that run there do not delay it."""
    attach(queue, 3)
    (suspect,), others = make(1), make(2)
    suspect.faults.starts_alone = True
    queue.put([*others, suspect])
    assert take(queue, load=3, prefilling=True) == []
    assert take(queue, load=3) == [suspect]
    suspect.faults.record_finite(update=0)
    queue.put([suspect], resumed=True)
    assert take(queue) == [suspect, *others]


def test_request_passed_over_too_often_goes_first(queue: RequestQueue):
    """It goes before any number of later requests with cached prefixes."""
    attach(queue, 0)
    (lone,) = make(1, prompt=[9] * (MIN_SHARED_PREFIX + 1))
    queue.put([lone])
    rounds = 0
    while True:
        queue.put(make(1, prompt=[7] * (MIN_SHARED_PREFIX + 1)))
        (taken,) = take(queue, room=1, cached=lambda r: 100 * (r.input_ids[0] == 7))
        if taken is lone:
            break
        rounds += 1
        assert rounds < 20
    assert rounds > 0


def test_prefix_is_what_the_first_tokens_are(queue: RequestQueue):
    """Two prompts share a prefix if they have the same first tokens and the same extra key."""
    start = list(range(MIN_SHARED_PREFIX))
    call = Call()
    one = Request(call, [*start, 1], None).candidate.prefix
    assert one == Request(call, [*start, 2, 3], None).candidate.prefix
    assert one != Request(call, [*start, 1], None, extra_key="other").candidate.prefix
    assert one != Request(call, [5, *start, 1], None).candidate.prefix
    assert Request(call, start, None).candidate.prefix is None


@pytest.mark.parametrize("alone", [False, True])
def test_a_change_waits_for_requests_that_its_engines_may_take(queue: RequestQueue, alone: bool):
    """It does not wait for a request that only another engine may run: that engine may be paused,
    or fail and wait for the change."""
    attach(queue, 0, 0)
    (pinned,), (failed,) = make(1, pinned_to=1), make(1)
    failed.faults.reasons = {0: "failed"}
    for request in (pinned, failed):
        request.output_ids, request.retracted = [7], True
        request.faults.starts_alone = alone
        queue.put([request], resumed=True)
        assert not queue.begun([0])
        assert not queue.has_retracted([0])
        assert queue.waits_for([1], [0])
        assert queue.begun([1])
        assert queue.begun([0, 1])
        assert queue.has_retracted([0, 1]) == (not alone)
        assert not queue.waits_for([0], [1])
        assert not queue.waits_for([1], [1])
        assert queue.discard(request)
