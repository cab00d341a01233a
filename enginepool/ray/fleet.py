"""Starts the hosts, listens to them and restarts them, on one event loop in its own thread.

Ray does placement, processes, restarts and transport. This module handles lost hosts, and keeps out
hosts that do not have the current weights.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any

from ray.exceptions import RayTaskError  # pyright: ignore[reportMissingImports]

from enginepool import EnginePoolError, InvalidRequest, PoolClosed, PoolFailed
from enginepool.ray.call import RayCall
from enginepool.ray.link import HostLink, HostLost
from enginepool.ray.output_router import OutputRouter
from enginepool.ray.wire import News, Prepared, Weights
from enginepool.ray.work_loop import WorkLoop

_logger = logging.getLogger("enginepool.ray")
# How often in a row a host may fail to start before it stays out.
_ATTEMPTS = 3
_BACKOFF = 1.0
# The options of a call that its outputs have in common.
OF_ALL = (
    *("return_logprob", "top_logprobs_num", "return_prompt_logprob"),
    *("return_sampling_mask", "return_routed_experts"),
)


class Fleet(WorkLoop):
    """The hosts. Coroutine methods run on the fleet's loop. Other threads call them by `run`.

    Attributes:
        number: The number of the update that every host should have.
        undone: The numbers of failed updates. A host may still have one of them.
        updates: The updates that a host gets when it comes back, in order: the last full update of
            the base and all later ones, and the last update of each adapter.
        first_updates: The adapters that calls may name, each with the number of its first update
            since it was last unloaded. `updates` may have others, which outputs still need.
        changing: Held while hosts get other weights, or are paused.
        paused: Whether hosts should be paused.
    """

    def __init__(self, actors: Sequence[Any], hang_timeout: float | None) -> None:
        super().__init__("enginepool-ray")
        self.hosts = [HostLink(i, actor, hang_timeout) for i, actor in enumerate(actors)]
        self.router = OutputRouter(self.hosts, self._ready, self._tell)
        self.number = 0
        self.undone: set[int] = set()
        self.weight_version: int | str = 0
        self.updates: list[Weights] = []
        self.first_updates: dict[str, int] = {}
        self.paused = False
        self.changing = asyncio.Lock()

    # Opening, listening and closing

    async def open(self) -> None:
        """Start every host, and wait until all serve.

        Raises:
            EnginePoolError: The error of the first host that did not start.
        """
        begun = [self._start(host) for host in self.hosts]
        for answer in await asyncio.gather(*begun, return_exceptions=True):
            if isinstance(answer, HostLost):
                raise PoolFailed(str(answer)) from answer.__cause__
            if isinstance(answer, BaseException):
                raise answer
        for host in self.hosts:
            self._spawn(self._keep(host))

    def close(self, error: EnginePoolError) -> None:
        """End all calls with this error. Called from another thread."""
        self._close(lambda: self.router.fail_all(error))

    async def _start(self, host: HostLink) -> None:
        host.state = "starting"
        await host.ask("ping")  # Ray answers when it has placed the actor, which may take long
        about = await host.ask("start", watched=True)
        host.starts += 1
        host.pid, host.node, host.slots = about["pid"], about["node"], about["slots"]
        host.number, host.state = about["number"], "catching up"
        async with self.changing:
            if host.number in self.undone:
                raise HostLost("it has weights that no other host got", end=True)
            for weights in self.updates:
                await host.ask("update", *weights.args, watched=True)
            kept = [one.lora_name for one in self.updates if one.lora_name is not None]
            await host.ask("caught_up", self.number, kept, watched=True)
            host.number = self.number
            # A process that Ray has not restarted may have missed the end of a pause.
            steer = ("pause", "retract") if self.paused else ("go_on",)
            await host.ask(*steer, watched=True)
            host.state, host.reason = "serving", None

    async def _keep(self, host: HostLink) -> None:
        """Listen to a host; start it again when it is lost."""
        attempts = 0
        while True:
            try:
                if host.state != "serving":
                    await self._start(host)
                self.router.pump()
                attempts = 0
                await self._listen(host)
            except Exception as error:
                if not isinstance(error, HostLost | EnginePoolError):
                    _logger.exception("host %s: an unexpected error", host.index)
                self._lost(host, error)
                attempts += not (isinstance(error, HostLost) and error.returns)
            if attempts > _ATTEMPTS:
                self._failed(host)
                return
            await asyncio.sleep(_BACKOFF * max(0.5, attempts - 1))

    async def _listen(self, host: HostLink) -> None:
        seen = 0
        while True:
            news: News = await host.ask("poll", seen, within=host.hang_timeout)
            if news.number > seen:
                seen = news.number
                self.router.heard(host, news)
                self.router.pump()

    def _lost(self, host: HostLink, error: Exception) -> None:
        """Move the outputs of a lost host to other hosts. End its process if it is still there."""
        ended_by_us = host.state == "lost"
        if not ended_by_us:
            host.state, host.reason = "lost", str(error)
        _logger.warning("host %s is lost: %s", host.index, host.reason)
        if isinstance(error, HostLost) and error.end:
            host.kill(no_restart=False)
        self.router.move(host, blamed=not ended_by_us)

    def end(self, host: HostLink, why: str) -> None:
        """End a host's process. `_listen` notices, and `_keep` starts it again."""
        host.state, host.reason = "lost", why
        host.kill(no_restart=False)

    def _failed(self, host: HostLink) -> None:
        host.state = "failed"
        if self._none_left():
            self.router.fail_all(self.failure())

    def _none_left(self) -> bool:
        return all(host.state == "failed" for host in self.hosts)

    def failure(self) -> EnginePoolError:
        """The error to raise if no host can run an output."""
        if self.closed:
            return PoolClosed("the pool is already closed")
        said = "; ".join(f"host {h.index}: {h.state} ({h.reason})" for h in self.hosts)
        return PoolFailed(f"no host is left ({said})")

    def serving(self) -> list[HostLink]:
        return [host for host in self.hosts if host.state == "serving"]

    def _ready(self) -> list[HostLink]:
        return [host for host in self.serving() if host.number == self.number]

    # Weights

    @property
    def adapters(self) -> dict[str, Weights]:
        """The last update of each adapter that calls may name."""
        named = {one.lora_name: one for one in self.updates if one.lora_name is not None}
        return {name: one for name, one in named.items() if name in self.first_updates}

    def updated(self, weights: Weights) -> None:
        """Remember that hosts have this update."""
        self.number = weights.number
        if weights.lora_name is None:
            self.weight_version = weights.weight_version
        else:
            self.first_updates.setdefault(weights.lora_name, weights.number)
        self.updates = [old for old in self.updates if not weights.replaces(old)] + [weights]

    async def unload(self, name: str) -> None:
        """Let no new call name an adapter. Hosts forget it once no output needs it."""
        async with self.changing:
            self._check_adapter(name, "lora_name")
            del self.first_updates[name]
        self._spawn(self._unload_unused(name))

    async def _unload_unused(self, name: str) -> None:
        while self.router.uses(name):
            await asyncio.sleep(_BACKOFF)
        async with self.changing:
            if name not in self.first_updates:  # it was not loaded again
                self.updates = [one for one in self.updates if one.lora_name != name]
                await self.on_all("unload", name)

    def _check_adapter(self, name: Any, argument: str) -> None:
        if not isinstance(name, str) or name not in self.first_updates:
            loaded = ", ".join(self.first_updates) or "none"
            raise InvalidRequest(
                f"{argument}={name!r}: no such adapter; loaded: {loaded}; load_lora_adapter loads "
                "one"
            )

    # Calls to hosts

    async def make_call(
        self, prompts: Any, sampling_params: Any, options: Mapping[str, Any], *, every: bool
    ) -> RayCall:
        """A call that a host has checked. Waits for one that serves, at most the call's `timeout`.

        Raises:
            InvalidRequest: As the call itself would.
        """
        timeout = options.get("timeout")
        valid = isinstance(timeout, int | float) and timeout > 0  # otherwise the host refuses it
        try:
            async with asyncio.timeout(timeout if valid else None):
                prepared = await self._checked(prompts, sampling_params, options)
        except TimeoutError:
            raise PoolFailed(
                f"no host has answered within timeout={timeout} seconds; nothing has started, try "
                "again"
            ) from None
        first_updates = {}
        for name in {one.meta["lora_path"] for one in prepared if "lora_path" in one.meta}:
            self._check_adapter(name, "lora_path")
            first_updates[name] = self.first_updates[name]
        kept = {name: one for name, one in options.items() if name in OF_ALL and one is not None}
        return RayCall(prepared, kept, every=every, first_updates=first_updates)

    async def _checked(self, *args: Any) -> list[Prepared]:
        while True:
            for host in self.serving():
                try:
                    return await host.ask("check", *args, watched=True)
                except HostLost as error:
                    if isinstance(error.__cause__, RayTaskError):  # another host raises it, too
                        raise EnginePoolError(f"a host cannot take the call: {error}") from error
                    _logger.debug("host %s did not check a call: %s", host.index, error)
            if self.closed or self._none_left():
                raise self.failure()
            await asyncio.sleep(0.1)

    def submit(self, call: RayCall) -> None:
        gone = [
            name
            for name, number in call.first_updates.items()
            if self.first_updates.get(name) != number
        ]
        if self.closed or self._none_left():
            call.fail(self.failure())
        elif gone:
            call.fail(InvalidRequest(f"lora_path={gone[0]!r}: unloaded since the call was made"))
        else:
            self.router.submit(call)

    def _tell(self, host: HostLink, method: str, *args: Any) -> None:
        self._spawn(self._told(host, method, *args))

    async def _told(self, host: HostLink, method: str, *args: Any) -> None:
        try:
            await host.ask(method, *args)
        except HostLost as error:  # `_listen` notices the lost host, too
            _logger.debug("host %s: %s: %s", host.index, method, error)

    async def on_all(
        self, method: str, *args: Any, hosts: Iterable[HostLink] | None = None
    ) -> dict[int, Any]:
        """Ask all hosts at the same time. Returns each one's answer or error, by host index."""
        asked = self.serving() if hosts is None else list(hosts)
        asking: list[Awaitable[Any]] = [host.ask(method, *args, watched=True) for host in asked]
        answers = await asyncio.gather(*asking, return_exceptions=True)
        return {host.index: one for host, one in zip(asked, answers, strict=True)}


class FleetCalls(ABC):
    """The base of every group of `RayEnginePool`'s calls."""

    _fleet: Fleet | None

    @property
    @abstractmethod
    def fleet(self) -> Fleet:
        """The hosts; starts them if they are not started.

        For tests and tools that look inside. Its contents may change at any time.

        Raises:
            PoolClosed, EnginePoolError: As `RayEnginePool.open`.
        """
