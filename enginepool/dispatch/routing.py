"""Chooses the requests that an engine takes: one pure function, without threads, clock or JAX.

Engines pull. At its step boundary an engine that has room asks which waiting requests it should
take. So an engine never holds more than it can run, and a slow engine asks less often. The length
of an output is not known in advance, and pulling does not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

# A shorter prefix is cheaper to compute again than to route by.
MIN_SHARED_PREFIX = 32
# How often a request may be overtaken by requests with a cached prefix before it goes first.
MAX_PASSED_OVER = 8


@dataclass(slots=True)
class Candidate:
    """A waiting request as routing sees it.

    Attributes:
        prefix: Equal for requests with the same first `MIN_SHARED_PREFIX` tokens, `extra_key` and
            adapter. None for prompts that are not longer than that.
        pinned: Whether only the asking engine may run the request.
        passed_over: How often a later request was taken before it.
    """

    prefix: Hashable | None
    pinned: bool = False
    passed_over: int = 0


def fair_share(waiting: int, loads: Sequence[int]) -> int:
    """How many requests each engine has if all are spread evenly, rounded up."""
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

    An engine takes up to its fair share of all requests. So the samples of one prompt spread over
    all engines if there is nothing else to do. Within its share, an engine first takes requests
    whose prefix is in its cache, then the oldest. If several requests share a prefix that is not
    cached, it takes one of them and leaves the others for its next boundary, when the prefix is
    cached. Otherwise it would compute the prefix once for each.

    Args:
        window: The oldest waiting requests, oldest first.
        waiting: How many requests wait, the window included.
        load: How many requests the asking engine holds.
        loads: How many requests each engine holds that takes some now, the asking engine included.
        room: How many more requests the asking engine can run.
        cached: Called with an index into the window, once for each prefix. Says how many of that
            prompt's first tokens the asking engine's prefix cache has.

    Returns:
        Indexes into the window, in the order of admission, `room` at most. Not empty if the engine
        is idle and the window is not empty.
    """
    pinned = [i for i, candidate in enumerate(window) if candidate.pinned]
    free = [i for i, candidate in enumerate(window) if not candidate.pinned]
    take = min(room - len(pinned), fair_share(waiting, loads) - load - len(pinned))
    chosen = pinned[:room]
    if take <= 0 or not free:
        return chosen

    overdue = [i for i in free if window[i].passed_over >= MAX_PASSED_OVER]
    rest = [i for i in free if window[i].passed_over < MAX_PASSED_OVER]
    # The sort is stable: among equals the oldest stays first.
    known: dict[Hashable, bool] = {None: False}
    for i in rest:
        if (prefix := window[i].prefix) not in known:
            known[prefix] = cached(i) >= MIN_SHARED_PREFIX
    hit = {i: known[window[i].prefix] for i in rest}
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
