"""A prefill is put off until more requests share it, while that saves steps."""

import heapq
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from enginepool import EnginePool
from enginepool.engine.steady.prefill_delay import PrefillDelay
from tests.support import faults
from tests.support.marks import steady_decode
from tests.support.pools import same
from tests.support.steady import GREEDY, LONGER

# Says whether a prefill is due, from the free rows, the running ones, and the steps since the last
# prefill. It is asked after each step.
type Due = Callable[[int, int, int], bool]


def steps_for(due: Due, rows: int, lengths: list[int]) -> int:
    """How many steps an engine with so many rows takes for outputs of these lengths. A prefill
    takes one step, for any number of requests."""
    left = lengths[::-1]
    ends = sorted(left.pop() for _ in range(rows))  # the step after which each row ends
    now, since, prefills = 0, 0, 1
    while ends or left:
        now, since = now + 1, since + 1
        while ends and ends[0] <= now:
            heapq.heappop(ends)
        free = rows - len(ends)
        if left and free and (not ends or due(free, len(ends), since)):
            for _ in range(min(free, len(left))):
                heapq.heappush(ends, now + left.pop())
            prefills, since = prefills + 1, 0
    return now + prefills


def by_delay(length: float) -> Due:
    delay = PrefillDelay()

    def due(free: int, running: int, since: int) -> bool:
        delay.ran(1, free=free)
        put_off = delay.left(waiting=1000, free=free, running=running, length=length, ahead=0)
        if not put_off:
            delay.restart()
        return not put_off

    return due


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("longest", [40, 200, 500])
def test_as_few_steps_as_the_best_interval(rows: int, longest: int) -> None:
    """Beside prefills as soon as a row is free, and beside all fixed intervals."""
    rng = random.Random(rows + longest)
    lengths = [rng.randint(longest // 10, longest) for _ in range(rows * 20)]
    delayed = steps_for(by_delay(sum(lengths) / len(lengths)), rows, lengths)
    at_once = steps_for(lambda *_: True, rows, lengths)
    best = min(
        steps_for(lambda free, running, since, k=k: since >= k, rows, lengths) for k in range(1, 60)
    )
    assert delayed <= 1.01 * best
    assert delayed < at_once if rows == 64 else delayed <= at_once


def left(delay: PrefillDelay, **changed: Any) -> int:
    return delay.left(**{"waiting": 9, "free": 2, "running": 6, "length": 20, "ahead": 0} | changed)


def test_until_free_rows_have_lost_what_a_prefill_costs() -> None:
    delay = PrefillDelay()
    assert [left(delay), left(delay, free=3), left(delay, free=4)] == [3, 2, 2]
    delay.ran(2, free=2)
    assert [left(delay), left(delay, ahead=1), left(delay, running=9)] == [1, 0, 3]
    delay.ran(1, free=2)
    assert left(delay) == 0
    delay.restart()
    assert left(delay) == 3


def test_not_without_a_queue() -> None:
    """All that wait have room: nothing is gained."""
    delay = PrefillDelay()
    assert [left(delay, waiting=waiting) for waiting in (0, 1, 2, 3)] == [0, 0, 0, 3]
    assert left(delay, waiting=0, free=0) == 0


def test_a_full_batch_and_a_long_time() -> None:
    delay = PrefillDelay()
    assert left(delay, free=0) == 6
    assert left(delay, free=0, running=500) == left(delay, free=1, running=500) == 32
    delay.ran(31, free=1)
    assert left(delay, free=1, running=500) == 1
    assert left(delay, free=1, running=500, ahead=1) == 0
    delay.ran(1, free=0)
    assert left(delay, free=1, running=500) == 32


def test_not_where_outputs_end_seldom() -> None:
    """A free row would lose more than a prefill costs before another row is free."""
    delay = PrefillDelay()
    assert [left(delay, length=length) for length in (None, 35, 36, 500)] == [0, 3, 0, 0]


@steady_decode
def test_an_engine_puts_prefills_off(
    steady_pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With eight rows and a queue, fewer prefills are launched than beside a stream, whose caller
    waits for first tokens."""
    engine: Any = steady_pool.engines[0]
    program = faults.scheduler_of(steady_pool, 0).prefill_program
    launch, prefills = program.launch, list[int]()

    def launching(bucket: int, *args: Any, **kwargs: Any) -> Any:
        prefills.append(bucket)
        return launch(bucket, *args, **kwargs)

    monkeypatch.setattr(program, "launch", launching)
    monkeypatch.setattr("enginepool.engine.steady.pace._IDLE", sys.maxsize)
    prompts = [[i % 250 + 1, 5, 7] for i in range(160)]
    rng = random.Random(1)
    params = [GREEDY | {"max_new_tokens": rng.randint(5, 40)} for _ in prompts]

    def generate() -> tuple[list[Any], int]:
        """Returns the results and the number of prefills."""
        prefills.clear()
        results = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        return results, len(prefills)

    generate()  # the length of outputs is known from here on
    results, few = generate()
    stream = engine.generate(input_ids=[3, 4], sampling_params=LONGER, stream=True)
    next(stream)
    expected, many = generate()
    list(stream)
    assert few < 0.75 * many
    same(results, expected)
