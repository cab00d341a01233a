"""Who gets what: one pure function, no threads, no clock, no jax.

Engines pull. At its step boundary an engine that has room asks which of the waiting requests
it should take, so an engine never holds more than it can run, and a slow one simply asks less
often. Length of outputs is unknown in advance; pulling needs no guess of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

# A prefix shorter than this costs less to compute again than to steer by.
MIN_SHARED_PREFIX = 32
# How often a request may be passed over for one with a cached prefix before it goes first.
MAX_PASSED_OVER = 8


@dataclass(slots=True)
class Candidate:
    """A waiting request as routing sees it.

    Attributes:
        prefix: Equal for requests that share their first `MIN_SHARED_PREFIX` tokens; None for
            prompts shorter than that.
        pinned: The request may run on the asking engine only.
        passed_over: How often it was left waiting while a later one was taken.
    """

    prefix: Hashable | None
    pinned: bool = False
    passed_over: int = 0


def fair_share(waiting: int, loads: Sequence[int]) -> int:
    """How many requests each engine holds when all work is spread evenly (rounded up)."""
    return -(-(waiting + sum(loads)) // max(1, len(loads)))


def choose(
    window: Sequence[Candidate],
    *,
    waiting: int,
    load: int,
    loads: Sequence[int],
    room: int,
    cached: Callable[[int], int],
) -> list[int]:
    """Choose which waiting requests an engine takes now.

    An engine takes up to its fair share of all work, so that the samples of one prompt spread
    over every engine when there is nothing else to do. Within that, requests whose prefix the
    engine has in its cache come first, then the oldest. Of several requests that share a prefix
    that nobody has computed yet it takes one and leaves the others for its next boundary, when
    the prefix is cached; taking all at once would compute it once a request.

    Args:
        window: The oldest waiting requests, oldest first.
        waiting: How many wait in all, the window included.
        load: How many requests the asking engine holds.
        loads: How many requests each serving engine holds, the asking one included.
        room: How many more the asking engine can run.
        cached: For an index into the window, how many tokens of that prompt the asking engine
            has in its prefix cache. Called only where the answer matters.

    Returns:
        Indexes into the window, in the order of admission; never more than `room`. Not empty if
        the engine is idle and the window is not.
    """
    pinned = [i for i, candidate in enumerate(window) if candidate.pinned]
    free = [i for i, candidate in enumerate(window) if not candidate.pinned]
    take = min(room - len(pinned), fair_share(waiting, loads) - load - len(pinned))
    chosen = pinned[:room]
    if take <= 0 or not free:
        return chosen

    overdue = [i for i in free if window[i].passed_over >= MAX_PASSED_OVER]
    rest = [i for i in free if window[i].passed_over < MAX_PASSED_OVER]
    # Stable: among equals the oldest stays first.
    hit = {i: _has_prefix(window[i], i, cached) for i in rest}
    starting = set()
    for i in overdue + sorted(rest, key=lambda i: not hit[i]):
        if take == 0:
            break
        prefix = window[i].prefix
        if prefix is not None and not hit.get(i, False):
            if prefix in starting:
                continue
            starting.add(prefix)
        chosen.append(i)
        take -= 1
    return chosen


def _has_prefix(candidate: Candidate, index: int, cached: Callable[[int], int]) -> bool:
    return candidate.prefix is not None and cached(index) >= MIN_SHARED_PREFIX
