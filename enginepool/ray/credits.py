"""Chooses which waiting outputs go to which host: one pure function, without Ray.

A host's credit is the number of outputs that it may still be given. In all it may have a quarter
more than it can run, so it never waits for the driver. An output that ends returns its credit at
once: hosts whose credits returned several at a time would be less busy than with fixed shares.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HostLoad:
    """A host that may get outputs now.

    Attributes:
        slots: How many outputs it runs at a time.
        outstanding: How many outputs it was given and has not ended.
        suspect: It has an output that may be the reason for a lost host. It gets no second one.
    """

    index: int
    slots: int
    outstanding: int
    suspect: bool = False

    @property
    def window(self) -> int:
        """The most outputs that it may have."""
        return math.ceil(self.slots * 1.25)


@dataclass(frozen=True)
class Waiting:
    """One waiting output.

    Attributes:
        group: Outputs that share a prompt or its beginning. They stay on one host if possible.
        last_host: The host that got the last output of the group. None if there is none.
        suspect: It may be the reason for a lost host. A host gets one such output at a time,
            because with two nobody could tell which one it was.
    """

    group: Hashable
    last_host: int | None = None
    suspect: bool = False


def assign(hosts: Sequence[HostLoad], waiting: Sequence[Waiting]) -> list[tuple[int, int]]:
    """Give out the oldest outputs first, until no host has credit.

    A group waits for its host as long as no other host has a free slot. Outputs behind it may pass.

    Returns:
        (position in `waiting`, host index), in the order of `waiting`.
    """
    loads = {host.index: host.outstanding for host in hosts}
    slots = {host.index: host.slots for host in hosts}
    windows = {host.index: host.window for host in hosts}
    suspected = {host.index for host in hosts if host.suspect}
    last_hosts: dict[Hashable, int] = {}
    given: list[tuple[int, int]] = []
    for position, one in enumerate(waiting):
        free = [index for index in loads if loads[index] < windows[index]]
        if not free:
            break
        if one.suspect:
            free = [index for index in free if index not in suspected]
        last_host = None if one.suspect else last_hosts.get(one.group, one.last_host)
        chosen = _choose(last_host, free, loads, slots)
        if chosen is not None:
            loads[chosen] += 1
            if one.suspect:
                suspected.add(chosen)
            last_hosts[one.group] = chosen
            given.append((position, chosen))
    return given


def _choose(
    last_host: int | None, free: Sequence[int], loads: dict[int, int], slots: dict[int, int]
) -> int | None:
    with_slot = [index for index in free if loads[index] < slots[index]]
    if last_host in loads:
        if last_host in with_slot or (last_host in free and not with_slot):
            return last_host
        if not with_slot:
            return None  # it waits for that host; no other host has a free slot
    return min(
        with_slot or free, key=lambda index: (loads[index] / slots[index], index), default=None
    )
