"""Which waiting outputs go to which host: one pure function, which knows nothing of Ray.

A host is asked for a quarter more than it can run, so that it never waits for the driver, and
every output that ends gives its credit back at once: credits that come back in chunks are worse
than a static split.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HostLoad:
    """A host that may be given something now.

    Attributes:
        slots: How many outputs it runs at a time.
        outstanding: How many it was given and has not answered.
        suspect: One of them may be what takes hosts down, so it gets no second of that kind.
    """

    index: int
    slots: int
    outstanding: int
    suspect: bool = False

    @property
    def window(self) -> int:
        """The most that may be outstanding."""
        return math.ceil(self.slots * 1.25)


@dataclass(frozen=True)
class Waiting:
    """One output that waits.

    Attributes:
        group: What shares a prompt, or the beginning of one, stays on a host where it can.
        home: The host that the group's last one went to, if there is one.
        suspect: It may be what takes hosts down. A host has one of them at a time: were it lost
            with two, nobody could say which of them it was.
    """

    group: Hashable
    home: int | None = None
    suspect: bool = False


def assign(hosts: Sequence[HostLoad], waiting: Sequence[Waiting]) -> list[tuple[int, int]]:
    """Give out the oldest first, until no host has credit.

    A group stays on its host, and waits for it while no other one would stand idle; those behind
    it may pass.

    Returns:
        (position in `waiting`, host index), in the order of `waiting`.
    """
    loads = {host.index: host.outstanding for host in hosts}
    slots = {host.index: host.slots for host in hosts}
    windows = {host.index: host.window for host in hosts}
    suspected = {host.index for host in hosts if host.suspect}
    homes: dict[Hashable, int] = {}
    given: list[tuple[int, int]] = []
    for position, one in enumerate(waiting):
        free = [index for index in loads if loads[index] < windows[index]]
        if not free:
            break
        if one.suspect:
            free = [index for index in free if index not in suspected]
        home = None if one.suspect else homes.get(one.group, one.home)
        chosen = _choose(home, free, loads, slots)
        if chosen is not None:
            loads[chosen] += 1
            if one.suspect:
                suspected.add(chosen)
            homes[one.group] = chosen
            given.append((position, chosen))
    return given


def _choose(
    home: int | None, free: Sequence[int], loads: dict[int, int], slots: dict[int, int]
) -> int | None:
    idle = [index for index in free if loads[index] < slots[index]]
    if home in loads:
        if home in idle or (home in free and not idle):
            return home
        if not idle:
            return None  # it waits for its host: nobody stands idle meanwhile
    return min(idle or free, key=lambda index: (loads[index] / slots[index], index), default=None)
