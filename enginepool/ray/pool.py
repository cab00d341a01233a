"""RayEnginePool: an `EnginePool` on each of many hosts, used as one."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import anyio.to_thread
import ray  # pyright: ignore[reportMissingImports]
from ray.util.placement_group import placement_group as make_placement_group  # pyright: ignore[reportMissingImports]
from ray.util.placement_group import remove_placement_group  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

from enginepool import EnginePool, EnginesDiffer, InvalidConfig, InvalidRequest, PoolClosed
from enginepool.ray.call import Call, Output
from enginepool.ray.fleet import Fleet, HostLost
from enginepool.ray.host import Host
from enginepool.ray.update import FleetReport, shared, update
from enginepool.ray.wire import Weights

Mode = Literal["drain", "retract", "abort", "in_place"]
_OPTIONS = (
    *("input_ids", "return_logprob", "top_logprobs_num", "return_prompt_logprob"),
    *("logprob_start_len", "timeout", "prompt_indices"),
)
# How long a host may take to close its pool before its process is ended.
_CLOSE_SECONDS = 60.0


class RayEnginePool:
    """One Ray actor a host, each with an unchanged `EnginePool`. Methods are thread-safe.

    `ray.init` is the caller's, and comes first. `with`, `async with`, `open()` or the first call
    opens the pool; `close()` is final. When the driver's process ends, so do the actors.

    Args:
        model: As `EnginePool`'s; every host reads it by itself.
        hosts: How many.
        devices_per_host: `devices` of each host's pool.
        placement_group: One bundle a host, in the order of `host_index`; left out, one is made
            that spreads hosts over different nodes (STRICT_SPREAD), and removed at the end.
        resources_per_host: Of a host's actor and bundle: {"CPU": 8, "TPU": 4}.
        runtime_env: Of the actors, as Ray takes it: {"env_vars": {"JAX_PLATFORMS": "tpu"}}.
        max_restarts: How often Ray starts a host's process again; -1 is always.
        hang_timeout: Seconds without an answer after which a host is ended and started again;
            None for no limit.
        pool_args: Everything else of `EnginePool`.

    Raises:
        InvalidConfig: What cannot hold, before anything has started.
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
        if isinstance(hosts, bool) or not isinstance(hosts, int) or hosts < 1:
            raise InvalidConfig(f"hosts={hosts!r}: expected an integer, 1 or more")
        if placement_group is not None and placement_group.bundle_count < hosts:
            raise InvalidConfig(
                f"the placement group has {placement_group.bundle_count} bundles for "
                f"hosts={hosts}: one each"
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

    # Life

    def open(self) -> Self:
        """Start every host's actor and pool. Idempotent while open.

        Raises:
            PoolClosed: The pool was closed.
            EnginePoolError: What the first host that does not start says; none is left.
        """
        with self._lock:
            if self.closed:
                raise PoolClosed("the pool is already closed; make a new one")
            if self._fleet is None:
                if not ray.is_initialized():
                    raise InvalidConfig(
                        "Ray is not there: call ray.init() first, before JAX starts"
                    )
                self._fleet = Fleet(self._make_actors(), self._hang_timeout)
                try:
                    self._fleet.run(self._fleet.open())
                except BaseException as error:
                    self._end(self._fleet, PoolClosed(f"the pool did not open: {error}"))
                    self._fleet = None
                    raise
        return self

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
        fleet.run(fleet.close(error))
        if ray.is_initialized():
            ray.wait(
                [actor.stop.remote() for actor in serving] or [ray.put(None)],
                num_returns=max(1, len(serving)),
                timeout=_CLOSE_SECONDS,
            )
            for host in fleet.hosts:
                ray.kill(host.actor)
            if self._own_group is not None:
                remove_placement_group(self._own_group)
                self._own_group = None
        fleet.end_loop()

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

    def _opened(self) -> Fleet:
        fleet = self._fleet
        if fleet is None:
            fleet = self.open()._fleet
        assert fleet is not None
        return fleet

    # Calls

    def generate_all(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Any = None,
        *,
        raise_on_error: bool = False,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """As `EnginePool.generate_all`, over all hosts; `meta_info["host_index"]` says where."""
        call = self._submit(prompts, sampling_params, options)
        try:
            self._wait(call, options.get("timeout"))
        except BaseException:
            self._leave(call)
            raise
        return call.results(raise_on_error)

    def as_completed(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Any = None,
        **options: Any,
    ) -> Iterator[dict[str, Any]]:
        """As `EnginePool.as_completed`."""
        call = self._submit(prompts, sampling_params, options)
        return (output.latest or {} for output in self._heard(call, options) if output.done)

    def stream(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Any = None,
        **options: Any,
    ) -> Iterator[dict[str, Any]]:
        """As `EnginePool.stream`: what each output has so far, and `index` of the output."""
        call = self._submit(prompts, sampling_params, options, every=True)
        return (
            {**(output.latest or {}), "index": output.position}
            for output in self._heard(call, options)
        )

    def _submit(
        self, prompts: Any, sampling_params: Any, options: dict[str, Any], *, every: bool = False
    ) -> Call:
        for name in options:
            if name not in _OPTIONS:
                raise InvalidRequest(f"{name} is unknown; it takes {', '.join(_OPTIONS)}")
        fleet = self._opened()
        checked = fleet.run(fleet.check(prompts, sampling_params, options))
        indices = options.get("prompt_indices")
        if indices is not None and len(indices) != len(checked):
            raise InvalidRequest(f"prompt_indices: {len(indices)} for {len(checked)} prompts")
        call = Call(every=every)
        kept = {
            name: value
            for name, value in options.items()
            if name not in ("input_ids", "timeout", "prompt_indices") and value is not None
        }
        call.fill(checked, sampling_params, kept, indices)
        fleet.post(fleet.submit, call)
        return call

    def _wait(self, call: Call, timeout: float | None) -> None:
        if not call.done.wait(timeout):
            why = f"not finished within timeout={timeout} seconds"
            self._leave(call, "timeout", why)
            call.done.wait()

    def _heard(self, call: Call, options: Mapping[str, Any]) -> Iterator[Output]:
        timeout = options.get("timeout")
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if deadline is not None and not left:
                    self._wait(call, 0.0)
                    deadline = left = None
                try:
                    output = call.news.get(timeout=left)
                except queue.Empty:
                    continue
                if output is None:
                    break
                yield output
        finally:
            if not call.done.is_set():
                self._leave(call)
        if call.failure is not None:
            call.results()

    def _leave(self, call: Call, err_type: str = "cancelled", why: str = "the caller left") -> None:
        if (fleet := self._fleet) is not None:
            fleet.post(fleet.leave, call, err_type, why)

    # Weights

    def update_weights(
        self,
        source: Any,
        *,
        weight_version: int | str | None = None,
        mode: Mode = "drain",
        strict: bool = True,
        copy: bool = False,
    ) -> FleetReport:
        """New weights on every host or, if one refuses, on none: staged on all, then committed.

        Args:
            source: A path or hub id that every host reads by itself; or arrays, as
                `EnginePool.update_weights` takes them, which go through Ray's object store and
                stay there for hosts that come back, until the next update.
            weight_version, mode, strict, copy: As `EnginePool.update_weights`.

        Raises:
            InvalidWeights, WeightUpdateFailed, InvalidRequest: What a host says; none has them.
        """
        fleet = self._opened()
        started = time.perf_counter()
        label = "" if weight_version is None else weight_version
        weights = Weights(0, label, shared(source), {"strict": strict, "copy": copy})
        return fleet.run(update(fleet, weights, mode, time.perf_counter() - started))

    def checksum(self) -> str:
        """`EnginePool.checksum` of every host that serves.

        Raises:
            EnginesDiffer: Hosts have different weights.
        """
        sums = self._ask_all("checksum")
        if len(set(sums.values())) > 1:
            listed = ", ".join(f"host {index}: {value}" for index, value in sums.items())
            raise EnginesDiffer(f"the hosts' weights differ: {listed}", checksums=sums)
        return next(iter(sums.values()))

    # Steering

    def pause_generation(self, mode: str = "retract") -> None:
        """As `EnginePool.pause_generation`, on every host; one that comes back is paused, too."""
        self._steer(True, "pause", mode)

    def continue_generation(self) -> None:
        """Go on after `pause_generation`."""
        self._steer(False, "go_on")

    def _steer(self, paused: bool, method: str, *args: Any) -> None:
        fleet = self._opened()

        async def steer() -> dict[int, Any]:
            async with fleet.changing:
                fleet.paused = paused
                return await fleet.on_all(method, *args)

        _raise_first(fleet.run(steer()))  # hosts that are away come back to it

    def stats(self) -> dict[str, Any]:
        """`hosts`, one entry each: state, pid, node, and `EnginePool.stats()` of those that
        serve; and what waits in the driver."""
        fleet = self._opened()
        said = fleet.run(fleet.on_all("stats"))
        hosts = []
        for host in fleet.hosts:
            pool = said.get(host.index)
            hosts.append(host.about() | (pool if isinstance(pool, dict) else {}))
        return {
            "hosts": hosts,
            "waiting": fleet.waiting,
            "running": sum(host["outstanding"] for host in hosts),
            "weight_version": fleet.weight_version,
        }

    def _ask_all(self, method: str) -> dict[int, Any]:
        fleet = self._opened()
        said = _raise_first(fleet.run(fleet.on_all(method)))
        if not said:
            raise fleet.failure()
        return said

    # Async twins: the same without blocking the event loop

    async def async_generate_all(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Any = None,
        *,
        raise_on_error: bool = False,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """`generate_all` on an event loop. Cancelling ends the outputs on the hosts."""
        call = await anyio.to_thread.run_sync(self._submit, prompts, sampling_params, options)
        try:
            await anyio.to_thread.run_sync(
                self._wait, call, options.get("timeout"), abandon_on_cancel=True
            )
        except BaseException:
            self._leave(call)
            raise
        return call.results(raise_on_error)

    async def async_as_completed(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Any = None,
        **options: Any,
    ) -> AsyncIterator[dict[str, Any]]:
        """`as_completed` on an event loop."""
        call = await anyio.to_thread.run_sync(self._submit, prompts, sampling_params, options)
        async for output in self._async_heard(call, options):
            if output.done:
                yield output.latest or {}

    async def async_stream(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Any = None,
        **options: Any,
    ) -> AsyncIterator[dict[str, Any]]:
        """`stream` on an event loop."""
        call = await anyio.to_thread.run_sync(
            lambda: self._submit(prompts, sampling_params, options, every=True)
        )
        async for output in self._async_heard(call, options):
            yield {**(output.latest or {}), "index": output.position}

    async def _async_heard(self, call: Call, options: Mapping[str, Any]) -> AsyncIterator[Output]:
        outputs = self._heard(call, options)
        try:
            while True:
                output = await anyio.to_thread.run_sync(next, outputs, None, abandon_on_cancel=True)
                if output is None:
                    return
                yield output
        finally:
            self._leave(call)

    async def async_update_weights(
        self,
        source: Any,
        *,
        weight_version: int | str | None = None,
        mode: Mode = "drain",
        strict: bool = True,
        copy: bool = False,
    ) -> FleetReport:
        """`update_weights` without blocking the event loop; cancelling does not stop it."""
        return await anyio.to_thread.run_sync(
            lambda: self.update_weights(
                source, weight_version=weight_version, mode=mode, strict=strict, copy=copy
            )
        )

    async def async_checksum(self) -> str:
        """`checksum` without blocking the event loop."""
        return await anyio.to_thread.run_sync(self.checksum)

    async def async_pause_generation(self, mode: str = "retract") -> None:
        """`pause_generation` without blocking the event loop."""
        await anyio.to_thread.run_sync(self.pause_generation, mode)

    async def async_continue_generation(self) -> None:
        """`continue_generation` without blocking the event loop."""
        await anyio.to_thread.run_sync(self.continue_generation)

    async def async_stats(self) -> dict[str, Any]:
        """`stats` without blocking the event loop."""
        return await anyio.to_thread.run_sync(self.stats)


def _raise_first(said: Mapping[int, Any]) -> dict[int, Any]:
    """What hosts have said, without those that were lost meanwhile."""
    for answer in said.values():
        if isinstance(answer, Exception) and not isinstance(answer, HostLost):
            raise answer
    return {index: one for index, one in said.items() if not isinstance(one, HostLost)}
