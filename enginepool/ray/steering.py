"""Calls that reach all hosts: weights, pauses and statistics."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Concatenate

import anyio.to_thread

from enginepool import EnginesDiffer, InvalidRequest, InvalidWeights
from enginepool.ray.fleet import FleetCalls
from enginepool.ray.link import HostLost
from enginepool.ray.update import FleetReport, Mode, shared, update
from enginepool.ray.wire import Weights


def _twin[C, **P, R](
    method: Callable[Concatenate[C, P], R],
) -> Callable[Concatenate[C, P], Coroutine[Any, Any, R]]:
    """Make an async method that runs this method in a thread. The pool's own function for it is not
    public."""

    @functools.wraps(method)
    async def twin(calls: C, *args: P.args, **kwargs: P.kwargs) -> R:
        return await anyio.to_thread.run_sync(functools.partial(method, calls, *args, **kwargs))

    twin.__doc__ = (
        f"`{method.__name__}` without blocking the event loop. Cancelling does not stop it."
    )
    return twin


class RaySteeringCalls(FleetCalls):
    """Mixin of `RayEnginePool`: calls that reach every host, each with its async twin."""

    def update_weights(
        self,
        source: Any,
        *,
        weight_version: int | str | None = None,
        mode: Mode = "drain",
        strict: bool = True,
        copy: bool = False,
    ) -> FleetReport:
        """Update weights on every host, or on none if one refuses. All stage, then all commit.

        Args:
            source: A path or hub id that every host reads by itself; or arrays, as
                `EnginePool.update_weights` takes them. They go through Ray's object store, and
                stay there for hosts that come back until an update with strict=True.
            weight_version, mode, strict, copy: As `EnginePool.update_weights`.

        Raises:
            InvalidWeights, WeightUpdateFailed, InvalidRequest: A host refused them, and no host has
                them.
        """
        fleet = self.fleet
        started = time.perf_counter()
        label = "" if weight_version is None else weight_version
        weights = Weights(0, label, shared(source), {"strict": strict, "copy": copy})
        return fleet.run(update(fleet, weights, mode, time.perf_counter() - started))

    def load_lora_adapter(
        self,
        lora_name: str,
        source: Any,
        *,
        config_dict: Mapping[str, Any] | None = None,
        weight_version: int | str | None = None,
        mode: Mode = "drain",
    ) -> FleetReport:
        """As `EnginePool.load_lora_adapter`, on every host, or on none if one refuses.

        Args:
            source: As in `update_weights`, by PEFT's names. Hosts that come back load it again.
            config_dict: None: arrays have the `config_dict` of the version before.

        Raises:
            InvalidWeights: As `update_weights`. Or arrays have no `config_dict`, and there is no
                version before that had one.
            InvalidRequest: An adapter of this name was unloaded, and outputs still need it.
        """
        if not isinstance(lora_name, str) or not lora_name:
            raise InvalidRequest(f"lora_name={lora_name!r}: expected a name")
        fleet = self.fleet
        started = time.perf_counter()
        label = "" if weight_version is None else weight_version
        packed = shared(source)
        if config_dict is None and not isinstance(packed, str):
            before = fleet.adapters.get(lora_name)
            config_dict = None if before is None else before.options["config_dict"]
            if config_dict is None:
                raise InvalidWeights(
                    "load_lora_adapter: arrays alone do not say how they are scaled; give "
                    'config_dict={"r": …, "lora_alpha": …}, as adapter_config.json has them'
                )
        adapter = Weights(0, label, packed, {"config_dict": config_dict}, lora_name)
        return fleet.run(update(fleet, adapter, mode, time.perf_counter() - started))

    def unload_lora_adapter(self, lora_name: str) -> None:
        """As `EnginePool.unload_lora_adapter`, on every host."""
        self.fleet.run(self.fleet.unload(lora_name))

    def checksum(self) -> str:
        """`EnginePool.checksum` of every host that serves.

        Raises:
            EnginesDiffer: Hosts have different weights.
        """
        fleet = self.fleet

        async def at_rest() -> dict[int, Any]:
            async with fleet.changing:  # not while some hosts have an update and others have not
                return await fleet.on_all("checksum")

        sums = _raise_first(fleet.run(at_rest()))
        if not sums:
            raise fleet.failure()
        if len(set(sums.values())) > 1:
            listed = ", ".join(f"host {index}: {value}" for index, value in sums.items())
            raise EnginesDiffer(f"the hosts' weights differ: {listed}", checksums=sums)
        return next(iter(sums.values()))

    def pause_generation(self, mode: str = "retract") -> None:
        """As `EnginePool.pause_generation`, on every host. Hosts that come back are paused, too."""
        if mode == "abort":
            why = "pause_generation(mode='abort')"
            self.fleet.post(self.fleet.router.end_waiting, "cancelled", why)
        self._steer(True, "pause", mode)

    def continue_generation(self) -> None:
        """Go on after `pause_generation`."""
        self._steer(False, "go_on")

    def stats(self) -> dict[str, Any]:
        """`hosts` has an entry for each host: state, pid, node, and `EnginePool.stats()` if it
        serves. `waiting` counts the outputs that wait in the driver."""
        fleet = self.fleet
        said = fleet.run(fleet.on_all("stats"))
        hosts = []
        for host in fleet.hosts:
            pool = said.get(host.index)
            hosts.append(host.about() | (pool if isinstance(pool, dict) else {}))
        return {
            "hosts": hosts,
            "waiting": fleet.router.waiting,
            "running": sum(host["outstanding"] for host in hosts),
            "weight_version": fleet.weight_version,
            "lora_adapters": {
                name: {"weight_version": one.weight_version} for name, one in fleet.adapters.items()
            },
        }

    async_update_weights = _twin(update_weights)
    async_load_lora_adapter = _twin(load_lora_adapter)
    async_unload_lora_adapter = _twin(unload_lora_adapter)
    async_checksum = _twin(checksum)
    async_pause_generation = _twin(pause_generation)
    async_continue_generation = _twin(continue_generation)
    async_stats = _twin(stats)

    def _steer(self, paused: bool, method: str, *args: Any) -> None:
        fleet = self.fleet

        async def steer() -> None:
            async with fleet.changing:
                _raise_first(await fleet.on_all(method, *args))
                fleet.paused = paused  # a host that starts again reads it

        fleet.run(steer())


def _raise_first(said: Mapping[int, Any]) -> dict[int, Any]:
    """The answers of the hosts that were not lost meanwhile. Raises the first error among them."""
    for answer in said.values():
        if isinstance(answer, Exception) and not isinstance(answer, HostLost):
            raise answer
    return {index: one for index, one in said.items() if not isinstance(one, HostLost)}
