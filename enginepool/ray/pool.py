"""RayEnginePool: an `EnginePool` on each of many hosts, used as one."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any, Self

import anyio.to_thread
import ray  # pyright: ignore[reportMissingImports]
from ray.util.placement_group import placement_group as make_placement_group  # pyright: ignore[reportMissingImports]
from ray.util.placement_group import remove_placement_group  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

from enginepool import EnginePool, InvalidConfig, PoolClosed
from enginepool.ray import requirements
from enginepool.ray.fleet import Fleet
from enginepool.ray.generate import RayGenerateCalls
from enginepool.ray.host import Host
from enginepool.ray.steering import RaySteeringCalls

# How long a host may take to close its pool before its process is ended.
_CLOSE_SECONDS = 60.0
# A host without news answers once a second.
_LEAST_HANG_SECONDS = 2.0


class RayEnginePool(RayGenerateCalls, RaySteeringCalls):
    """One Ray actor per host, each with an unchanged `EnginePool`. Methods are thread-safe.

    Call `ray.init` first. `with`, `async with`, `open()` or the first call opens the pool;
    `close()` is final. When the driver's process ends, so do the actors.

    Args:
        model: As in `EnginePool`. Every host reads it by itself.
        hosts: The number of hosts.
        devices_per_host: `devices` of each host's pool.
        placement_group: Has one bundle per host, in the order of `host_index`. The default is a new
            group that puts hosts on different nodes (STRICT_SPREAD), and is removed at the end.
        resources_per_host: Ray's resources of a host's actor and bundle, for example
            {"CPU": 8, "TPU": 4}. Default: one CPU.
        runtime_env: Ray's environment of the actors, for example
            {"env_vars": {"JAX_PLATFORMS": "tpu"}}.
        max_restarts: How often Ray starts a host's process again; -1 is always.
        hang_timeout: Seconds without an answer after which a host is ended and started again, 2 or
            more; None for no limit.
        pool_args: All other arguments of `EnginePool`, except `max_queued`.

    Raises:
        InvalidConfig: An argument is invalid. Nothing has started.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        hosts: int,
        devices_per_host: int | None = None,
        placement_group: Any = None,
        resources_per_host: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        max_restarts: int = -1,
        hang_timeout: float | None = 60.0,
        **pool_args: Any,
    ) -> None:
        requirements.check()
        for name, value, least in (("hosts", hosts, 1), ("max_restarts", max_restarts, -1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidConfig(f"{name}={value!r}: expected an integer, {least} or more")
        if hang_timeout is not None and not (
            isinstance(hang_timeout, int | float)
            and not isinstance(hang_timeout, bool)
            and _LEAST_HANG_SECONDS <= hang_timeout < math.inf
        ):
            raise InvalidConfig(
                f"hang_timeout={hang_timeout!r}: expected a finite number of seconds, "
                f"{_LEAST_HANG_SECONDS:g} or more, or None for no limit"
            )
        if pool_args.get("max_queued") is not None:
            raise InvalidConfig(
                f"max_queued={pool_args['max_queued']!r}: outputs wait in the driver, and their "
                "number has no limit; leave max_queued out"
            )
        if placement_group is not None and placement_group.bundle_count < hosts:
            raise InvalidConfig(
                f"placement_group has {placement_group.bundle_count} bundles: expected one for "
                f"each of hosts={hosts}"
            )
        EnginePool(model, devices=devices_per_host, **pool_args)  # checks, and starts nothing
        self._pool_args = {"model": model, "devices": devices_per_host, **pool_args}
        self._count = hosts
        self._group = placement_group
        self._own_group: Any = None
        self._resources = {"CPU": 1.0, **(resources_per_host or {})}
        self._runtime_env = dict(runtime_env or {})
        self._max_restarts = max_restarts
        self._hang_timeout = hang_timeout
        self._fleet: Fleet | None = None
        self._lock = threading.Lock()
        self.closed = False

    def __repr__(self) -> str:
        fleet = self._fleet
        state = "closed" if self.closed else "not opened"
        if fleet is not None and not self.closed:
            state = f"{len(fleet.serving())} of {self._count} hosts serving"
        return f"<RayEnginePool [{state}]>"

    # Opening and closing

    def open(self) -> Self:
        """Start every host's actor and pool. Idempotent while open.

        Raises:
            PoolClosed: The pool was closed.
            EnginePoolError: A host did not start. All hosts are ended.
        """
        self._open_once()
        return self

    def _open_once(self) -> Fleet:
        with self._lock:
            if self.closed:
                raise PoolClosed("the pool is already closed; make a new one")
            if self._fleet is None:
                if not ray.is_initialized():
                    raise InvalidConfig(
                        "Ray is not initialized: call ray.init() first, before JAX starts"
                    )
                try:
                    self._fleet = Fleet(self._make_actors(), self._hang_timeout)
                except BaseException:  # Ray refuses an argument
                    self._remove_group()
                    raise
                try:
                    self._fleet.run(self._fleet.open())
                except BaseException as error:
                    self._end(self._fleet, PoolClosed(f"the pool did not open: {error}"))
                    self._fleet = None
                    raise
            return self._fleet

    def _make_actors(self) -> list[Any]:
        group = self._group
        if group is None:
            bundles = [dict(self._resources) for _ in range(self._count)]
            group = self._own_group = make_placement_group(bundles, strategy="STRICT_SPREAD")
        resources = dict(self._resources)
        actor: Any = ray.remote(Host)
        options = {
            "num_cpus": resources.pop("CPU"),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "runtime_env": self._runtime_env,
            "max_restarts": self._max_restarts,
            "max_task_retries": 0,  # a retry would wait for the same host
            "max_concurrency": 1000,  # calls of an asynchronous actor, not threads
        }
        return [
            actor.options(
                **options,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                ),
            ).remote(index, self._pool_args)
            for index in range(self._count)
        ]

    def close(self) -> None:
        """Close every host's pool and end its actor. Idempotent and final; calls that wait get
        `PoolClosed`."""
        with self._lock:
            self.closed = True
            fleet, self._fleet = self._fleet, None
        if fleet is not None:
            self._end(fleet, PoolClosed("the pool was closed"))

    def _end(self, fleet: Fleet, error: PoolClosed) -> None:
        serving = [host.actor for host in fleet.serving()]
        fleet.close(error)
        if ray.is_initialized():
            ray.wait(
                [actor.stop.remote() for actor in serving] or [ray.put(None)],
                num_returns=max(1, len(serving)),
                timeout=_CLOSE_SECONDS,
            )
            for host in fleet.hosts:
                host.kill(no_restart=True)
            self._remove_group()
        fleet.end_loop()

    def _remove_group(self) -> None:
        group, self._own_group = self._own_group, None
        if group is not None:
            remove_placement_group(group)

    async def aclose(self) -> None:
        """`close` without blocking the event loop; shielded from cancellation."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.close)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        await anyio.to_thread.run_sync(self.open)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def fleet(self) -> Fleet:
        return self._fleet or self._open_once()  # another thread may close it meanwhile
