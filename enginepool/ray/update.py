"""Updates weights or an adapter on all hosts: each stages, then each commits, or none does.

A host that is lost meanwhile starts again, and serves only when it has the update.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import ray  # pyright: ignore[reportMissingImports]

from enginepool import (
    AdapterReport,
    EnginePoolError,
    InvalidRequest,
    StaleWeights,
    SwapReport,
    WeightUpdateFailed,
)
from enginepool.ray.fleet import Fleet
from enginepool.ray.link import HostLink
from enginepool.ray.wire import Weights, pack_tree

# The modes of `EnginePool.update_weights`.
Mode = Literal["drain", "retract", "abort", "in_place"]


@dataclass(frozen=True)
class FleetReport:
    """The result of an update of all hosts.

    Attributes:
        seconds: By phase: "put" into the object store, "stage", "commit", "total".
        hosts: The report of each host's pool.
        missing: Hosts that were lost before or during the update, with the reason. They get it
            before they serve again.
    """

    weight_version: int | str
    seconds: dict[str, float]
    hosts: dict[int, SwapReport | AdapterReport]
    missing: dict[int, str] = field(default_factory=dict)


def shared(source: Any) -> Any:
    """A source as every host can read it: a path as it is, arrays in Ray's object store.

    The reference keeps them there for hosts that come back.
    """
    if isinstance(source, str) or hasattr(source, "__fspath__"):
        return str(source)
    if isinstance(source, Iterator):
        source = dict(source)
    return ray.put(pack_tree(dict(source) if isinstance(source, Mapping) else source))


async def update(fleet: Fleet, weights: Weights, mode: Mode, put_seconds: float) -> FleetReport:
    """
    Args:
        weights: The update, without its number.

    Raises:
        InvalidWeights, WeightUpdateFailed: A host refused the weights, so no host has them.
        InvalidRequest: The mode does not exist, or outputs still use the adapter's name.
    """
    if mode not in (modes := get_args(Mode)):
        raise InvalidRequest(f"mode={mode!r}: expected one of {', '.join(modes)}")
    async with fleet.changing:
        _check_name(fleet, weights.lora_name)
        started = time.perf_counter()
        number = max((fleet.number, *fleet.undone)) + 1  # never one that a host may have
        label = weights.weight_version
        weights = replace(weights, number=number, weight_version=number if label == "" else label)
        hosts = fleet.serving()
        if not hosts:
            raise WeightUpdateFailed(
                "no host serves at the moment; nothing was touched, try again", engine_index=-1
            )
        staged = await _stage(fleet, weights, hosts)
        at = time.perf_counter()
        fleet.undone.add(number)
        reports = await _commit(fleet, number, mode, staged)
        fleet.undone.discard(number)
        fleet.updated(weights)
        for host in fleet.hosts:
            if host.index in reports:
                host.number = number
            elif host.state == "serving":  # a commit cannot be undone
                fleet.end(host, f"it did not get update {number}")
    fleet.router.pump()
    ended = time.perf_counter()
    seconds = {"put": put_seconds, "stage": at - started, "commit": ended - at}
    missing = {
        host.index: host.reason or "it was away"
        for host in fleet.hosts
        if host.index not in reports
    }
    return FleetReport(
        weights.weight_version,
        seconds | {"total": put_seconds + ended - started},
        reports,
        missing,
    )


def _check_name(fleet: Fleet, name: str | None) -> None:
    """Refuse an adapter whose name outputs still use for an adapter that was unloaded. Hosts would
    take it for a new version of that adapter."""
    if name is not None and name not in fleet.first_updates and fleet.router.uses(name):
        raise InvalidRequest(
            f"lora_name={name!r}: outputs still need the adapter of this name that was unloaded; "
            "wait until they have ended, or load this one under another name"
        )


async def _stage(fleet: Fleet, weights: Weights, hosts: list[HostLink]) -> list[HostLink]:
    """The hosts that have staged the weights. If one refuses, none keeps them."""
    pids = {host.index: host.pid for host in hosts}
    said = await fleet.on_all("stage", *weights.args, hosts=hosts)
    refused = [answer for answer in said.values() if isinstance(answer, EnginePoolError)]
    staged = [
        host
        for host in hosts
        if said[host.index] is None and host.state == "serving" and host.pid == pids[host.index]
    ]
    if refused or not staged:
        await fleet.on_all("discard", weights.number, hosts=staged)
        if refused:
            raise refused[0]
        raise WeightUpdateFailed(
            "every host was lost while weights were staged; none has them, try again",
            engine_index=-1,
        )
    return staged


async def _commit(
    fleet: Fleet, number: int, mode: str, hosts: list[HostLink]
) -> dict[int, SwapReport | AdapterReport]:
    said = await fleet.on_all("commit", number, mode, hosts=hosts)
    kinds = SwapReport, AdapterReport
    reports = {index: one for index, one in said.items() if isinstance(one, kinds)}
    refused = {
        index: one
        for index, one in said.items()
        if isinstance(one, EnginePoolError) and not isinstance(one, StaleWeights)
    }
    for host in hosts:
        # It is not known whether a host without an answer has the weights. Once started again, it
        # does not have them, and gets them if others have them.
        if host.index not in reports and host.index not in refused and host.state == "serving":
            fleet.end(host, f"it did not answer a commit: {said[host.index]}")
    if not reports:
        await fleet.on_all("discard", number, hosts=[h for h in hosts if h.index in refused])
        for error in refused.values():
            raise error
        raise WeightUpdateFailed(
            "every host was lost before the commit; those that come back have the weights from "
            "before, try again",
            engine_index=-1,
        )
    return reports
