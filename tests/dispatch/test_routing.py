"""Which engine gets which request: the pure function, tested by properties and in a simulation
whose clock counts ticks."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginepool import EnginePool
from enginepool.dispatch.routing import MAX_PASSED_OVER, MIN_SHARED_PREFIX, Candidate, choose
from tests.pool.test_generation import params, random_ids
from tests.support.pools import MakePool

ENGINES, ROOM = 4, 8

candidates = st.lists(
    st.builds(
        Candidate,
        prefix=st.one_of(st.none(), st.integers(0, 3)),
        pinned=st.booleans(),
        passed_over=st.integers(0, 2 * MAX_PASSED_OVER),
    ),
    max_size=40,
)


@given(candidates, st.integers(0, 50), st.integers(0, 16), st.lists(st.integers(0, 16)), st.data())
def test_choice_is_sound(
    window: list[Candidate], more: int, room: int, others: list[int], data: st.DataObject
):
    """An engine gets no more requests than it has room for, and none twice. Pinned requests come
    first. An idle engine gets something if there is something for it."""
    load = data.draw(st.integers(0, 8))
    lengths = data.draw(st.lists(st.integers(0, 200), min_size=40, max_size=40))
    chosen = choose(
        window,
        waiting=len(window) + more,
        load=load,
        loads=[load, *others],
        room=room,
        cached=lengths.__getitem__,
    )
    assert len(chosen) <= room
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= set(range(len(window)))
    pinned = [i for i, candidate in enumerate(window) if candidate.pinned]
    assert chosen[: len(pinned)] == pinned[:room]
    if load == 0 and room > 0 and window:
        assert chosen


@given(candidates, st.integers(1, 16))
def test_overdue_requests_go_first(window: list[Candidate], room: int):
    """Requests that were passed over often enough come before any cached prefix, the oldest
    first."""
    for candidate in window:
        candidate.pinned = False
    chosen = choose(
        window, waiting=len(window), load=0, loads=[0], room=room, cached=lambda i: 10**6
    )
    overdue = [i for i, one in enumerate(window) if one.passed_over >= MAX_PASSED_OVER]
    # Of several requests with the same prefix, which is not cached, only the first starts.
    seen: set[object] = set()
    due = [
        i
        for i in overdue
        if window[i].prefix is None or not (window[i].prefix in seen or seen.add(window[i].prefix))
    ]
    assert chosen[: len(due)] == due[:room]


def test_cached_prefixes_are_preferred():
    """An engine takes requests whose prefix it has cached, then the oldest of the others."""
    window = [Candidate(prefix) for prefix in ("a", "b", None, "b", "c")]
    cached = {0: 0, 1: MIN_SHARED_PREFIX, 3: 100, 4: MIN_SHARED_PREFIX - 1}.__getitem__
    chosen = choose(window, waiting=5, load=0, loads=[0], room=3, cached=cached)
    assert chosen == [1, 3, 0]


@pytest.mark.parametrize("tokens", [0, MIN_SHARED_PREFIX])
def test_a_prefix_is_looked_up_once(tokens: int):
    """Once for all requests that have it: a prompt may have many samples."""
    window = [Candidate("a"), Candidate("b"), *[Candidate("a")] * 60, Candidate(None)]
    asked: list[int] = []

    def cached(i: int) -> int:
        asked.append(i)
        return tokens

    choose(window, waiting=63, load=0, loads=[0], room=63, cached=cached)
    assert asked == [0, 1]


def test_prefix_that_nobody_has_is_computed_once():
    """Of three requests that share a prefix, an engine starts one and leaves the others waiting."""
    window = [Candidate("a"), Candidate("a"), Candidate("b"), Candidate("a"), Candidate(None)]
    chosen = choose(window, waiting=5, load=0, loads=[0], room=8, cached=lambda i: 0)
    assert chosen == [0, 2, 4]


def test_an_engine_takes_its_fair_share():
    """Eight requests and four idle engines: two each, although one could take all."""
    window = [Candidate(None) for _ in range(8)]
    assert choose(window, waiting=8, load=0, loads=[0] * 4, room=8, cached=lambda i: 0) == [0, 1]
    assert choose(window, waiting=8, load=2, loads=[2, 4, 4, 4], room=6, cached=lambda i: 0) == (
        [0, 1, 2, 3]  # (8 + 14) / 4, rounded up, less two
    )
    assert not choose(window, waiting=8, load=6, loads=[6, 0, 0, 0], room=2, cached=lambda i: 0)


@dataclass
class Simulated:
    """An engine that advances each of its requests by one token a tick."""

    left: dict[int, int] = field(default_factory=dict)  # tokens still to come, by request
    prefixes: set[object] = field(default_factory=set)
    finished_at: int = 0
    served: int = 0

    def step(self, clock: int) -> list[int]:
        done = [request for request, left in self.left.items() if left == 1]
        self.left = {request: left - 1 for request, left in self.left.items() if left > 1}
        if done:
            self.finished_at = clock
        return done


def simulate(
    lengths: Sequence[int], prefixes: Sequence[object] | None = None
) -> tuple[list[Simulated], list[int]]:
    """Run requests through `choose`. Returns the engines, and the requests in the order of their
    start."""
    prefixes = prefixes or [None] * len(lengths)
    waiting = {i: Candidate(prefixes[i]) for i in range(len(lengths))}
    engines = [Simulated() for _ in range(ENGINES)]
    started: list[int] = []
    clock = 0
    while waiting or any(engine.left for engine in engines):
        clock += 1
        for engine in random.Random(clock).sample(engines, ENGINES):  # not in step
            engine.step(clock)
            window = list(waiting)[: max(64, 2 * ROOM)]
            chosen = choose(
                [waiting[i] for i in window],
                waiting=len(waiting),
                load=len(engine.left),
                loads=[len(one.left) for one in engines],
                room=ROOM - len(engine.left),
                cached=lambda k, e=engine, w=window: 100 * (prefixes[w[k]] in e.prefixes),
            )
            for k in set(range(max(chosen, default=0))).difference(chosen):
                waiting[window[k]].passed_over += 1
            for request in (window[k] for k in chosen):
                del waiting[request]
                started.append(request)
                engine.left[request] = lengths[request]
                engine.prefixes.add(prefixes[request])
                engine.served += 1
    return engines, started


def simulate_round_robin(lengths: Sequence[int]) -> list[Simulated]:
    """The same engines, each with its own queue, which gets its requests at the start in turn."""
    engines = [Simulated() for _ in range(ENGINES)]
    queues = [deque(range(i, len(lengths), ENGINES)) for i in range(ENGINES)]
    clock = 0
    while any(queues) or any(engine.left for engine in engines):
        clock += 1
        for engine, queue in zip(engines, queues, strict=True):
            engine.step(clock)
            while queue and len(engine.left) < ROOM:
                request = queue.popleft()
                engine.left[request] = lengths[request]
    return engines


def spread(engines: Sequence[Simulated]) -> int:
    ends = [engine.finished_at for engine in engines]
    return max(ends) - min(ends)


LENGTHS = [random.Random(seed).choices(range(1, 201), k=1000) for seed in range(5)]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_engines_finish_together(lengths: list[int]):
    """With outputs of 1 to 200 tokens the last engine ends at most one longest output after the
    first."""
    engines, _ = simulate(lengths)
    assert sum(engine.served for engine in engines) == len(lengths)
    assert spread(engines) <= max(lengths)


def test_round_robin_does_not():
    """Round robin breaks the promise above."""
    assert max(spread(simulate_round_robin(lengths)) for lengths in LENGTHS) > 200


def test_samples_of_one_prompt_occupy_all_engines():
    """64 requests share a prefix. Every engine computes it once and takes its share."""
    engines, _ = simulate([50] * 64, ["prompt"] * 64)
    assert [engine.served for engine in engines] == [16] * 4
    assert spread(engines) <= 50


@pytest.mark.parametrize("groups", [2, 3, 7])
def test_no_request_starves(groups: int):
    """A request whose prefix no engine has starts, however many requests with cached prefixes
    there are."""
    lengths = [5] * 800
    prefixes: list[object] = [f"shared {i % groups}" for i in range(800)]
    prefixes[100] = "alone"
    _, started = simulate(lengths, prefixes)
    assert sorted(started) == list(range(800))
    assert started.index(100) <= 100 + 64 + ENGINES * ROOM * (MAX_PASSED_OVER + 1)


def test_samples_of_one_prompt_run_on_all_engines(pool: EnginePool):
    """n=64 on four real engines, with a prompt long enough to share."""
    results = pool.generate_all(
        input_ids=[random_ids(100, 5)], sampling_params={"n": 64, "max_new_tokens": 24}
    )
    served = [result["meta_info"]["engine_index"] for result in results]
    assert set(served) == {0, 1, 2, 3}
    assert max(served.count(i) for i in range(4)) <= 32


def test_shared_prefix_is_cached_nearly_as_often_as_on_one_engine(make_pool: MakePool):
    """Prompts begin with the same 100 tokens. Four engines compute these four times."""
    shared = random_ids(100, 77)
    prompts = [shared + random_ids(8, i) for i in range(96)]
    cached = []
    for pool in (make_pool("qwen3", 1, warmup="none"), make_pool("qwen3", 4)):
        pool.flush_cache()
        results = pool.generate_all(input_ids=prompts, sampling_params=params(3)[0])
        meta = [result["meta_info"] for result in results]
        assert len({m["engine_index"] for m in meta}) == len(pool.engines)
        cached.append(sum(m["cached_tokens"] for m in meta))
    assert cached[0] > 90 * 96
    assert cached[1] >= 0.9 * cached[0]
