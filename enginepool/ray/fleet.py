"""The hosts, and what each of them has: all on one event loop, in a thread of the driver's.

Ray does placement, processes, restarts and transport. What is here is credits, prompts that move
on from a host that is lost, and hosts that are barred until they have the current weights.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.exceptions import ActorUnavailableError, RayError  # pyright: ignore[reportMissingImports]

from enginepool import EnginePoolError, InvalidRequest, PoolClosed, PoolFailed
from enginepool.ray.call import Call, Output
from enginepool.ray.credits import HostLoad, Waiting, assign
from enginepool.ray.wire import News, Refused, Weights

_logger = logging.getLogger("enginepool.ray")
# How many of the oldest waiting outputs are looked at.
_WINDOW = 1024
# How often in a row a host may fail to start before it stays out.
_ATTEMPTS = 3
_BACKOFF = 1.0


class HostLost(Exception):
    """A host does not answer, or not as one that is well.

    Attributes:
        end: Whether its process is still there, and has to go.
        returns: Whether Ray is starting it again at this moment.
    """

    def __init__(self, message: str, *, end: bool = False, returns: bool = False) -> None:
        super().__init__(message)
        self.end = end
        self.returns = returns


class HostLink:
    """A host as its driver sees it.

    Attributes:
        state: "starting", "catching up", "serving" or "lost"; "failed" is for good.
        number: The update of weights that it has.
        running: The outputs that it was given, by the key of the attempt.
    """

    def __init__(self, index: int, actor: Any) -> None:
        self.index = index
        self.actor = actor
        self.state = "starting"
        self.reason: str | None = None
        self.number = 0
        self.slots = 0
        self.pid: int | None = None
        self.node: str | None = None
        self.starts = 0
        self.running: dict[int, Output] = {}

    def load(self) -> HostLoad:
        reserved = any(output.alone for output in self.running.values())
        return HostLoad(self.index, self.slots, len(self.running), reserved)

    def about(self) -> dict[str, Any]:
        return {
            "host_index": self.index,
            "state": self.state,
            "reason": self.reason,
            "pid": self.pid,
            "node": self.node,
            "slots": self.slots,
            "outstanding": len(self.running),
            "restarts": max(0, self.starts - 1),
        }


class Fleet:
    """Methods that are coroutines run on the loop; `run` brings one there.

    Attributes:
        number: Of the update that every host is to have.
        undone: Of updates that came to nothing; a host may have one all the same.
        updates: From the last whole set on, for hosts that come back.
        changing: Held while hosts get other weights, or are paused.
        paused: Whether hosts are to be paused.
    """

    def __init__(self, actors: Sequence[Any], hang_timeout: float | None) -> None:
        self.hosts = [HostLink(index, actor) for index, actor in enumerate(actors)]
        self.number = 0
        self.undone: set[int] = set()
        self.weight_version: int | str = 0
        self.updates: list[Weights] = []
        self.paused = False
        self.closed = False
        self._hang_timeout = hang_timeout
        self._keys = itertools.count()
        self._waiting: dict[int, Output] = {}  # by arrival; what resumes keeps its place
        self._arrivals: dict[Output, int] = {}
        self._arrival = itertools.count()
        self._calls: set[Call] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self.changing = asyncio.Lock()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="enginepool-ray", daemon=True
        )
        self._thread.start()

    # From other threads

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    def end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # Life

    async def open(self) -> None:
        """Start every host, and wait until all serve.

        Raises:
            EnginePoolError: What the first that does not start says.
        """
        begun = [self._start(host) for host in self.hosts]
        for answer in await asyncio.gather(*begun, return_exceptions=True):
            if isinstance(answer, HostLost):
                raise PoolFailed(str(answer)) from answer.__cause__
            if isinstance(answer, BaseException):
                raise answer
        for host in self.hosts:
            self._spawn(self._keep(host))

    async def close(self, error: EnginePoolError) -> None:
        self.closed = True
        for call in list(self._calls):
            call.fail(error)
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _start(self, host: HostLink) -> None:
        host.state = "starting"
        about = await self.ask(host, "start")
        host.starts += 1
        host.pid, host.node, host.slots = about["pid"], about["node"], about["slots"]
        host.number, host.state = about["number"], "catching up"
        async with self.changing:
            if host.number in self.undone:
                raise HostLost("it has weights that no other host got", end=True)
            for weights in self.updates:
                await self.ask(
                    host,
                    "update",
                    weights.number,
                    weights.weight_version,
                    weights.options,
                    weights.source,
                    watched=True,
                )
                host.number = weights.number
            if self.paused:
                await self.ask(host, "pause", "retract", watched=True)
            if host.number == self.number:
                host.state, host.reason = "serving", None

    async def _keep(self, host: HostLink) -> None:
        """Hear what a host has to say; start it again when it is lost."""
        attempts = 0
        while True:
            try:
                if host.state != "serving":
                    await self._start(host)
                self.pump()
                attempts = 0
                await self._listen(host)
            except (HostLost, EnginePoolError) as error:
                self._lost(host, error)
                attempts += not (isinstance(error, HostLost) and error.returns)
            if attempts > _ATTEMPTS:
                self._failed(host)
                return
            await asyncio.sleep(_BACKOFF * max(0.5, attempts - 1))

    async def _listen(self, host: HostLink) -> None:
        seen = 0
        while True:
            news: News = await self.ask(host, "poll", seen, within=self._hang_timeout)
            if news.number > seen:
                seen = news.number
                self._heard(host, news)
                self.pump()

    def _lost(self, host: HostLink, error: Exception) -> None:
        """Its outputs go on elsewhere; one that hangs is ended."""
        host.state, host.reason = "lost", str(error)
        _logger.warning("host %s is lost: %s", host.index, error)
        if isinstance(error, HostLost) and error.end:
            ray.kill(host.actor, no_restart=False)
        running, host.running = host.running, {}
        for output in running.values():
            output.call.homes.pop(output.group, None)
            if not output.done and output.lost_with(host.index):
                self._waiting[self._arrivals[output]] = output
        self._waiting = dict(sorted(self._waiting.items()))
        self.pump()

    def end(self, host: HostLink, why: str) -> None:
        """End a host's process; `_listen` hears of it, and it starts again."""
        host.state, host.reason = "lost", why
        ray.kill(host.actor, no_restart=False)

    def _failed(self, host: HostLink) -> None:
        host.state = "failed"
        if all(other.state == "failed" for other in self.hosts):
            for call in list(self._calls):
                call.fail(self.failure())

    def failure(self) -> EnginePoolError:
        """What to raise where no host can do it."""
        if self.closed:
            return PoolClosed("the pool is already closed")
        said = "; ".join(f"host {h.index}: {h.state} ({h.reason})" for h in self.hosts)
        return PoolFailed(f"no host is left ({said})")

    # Asking a host

    async def ask(
        self,
        host: HostLink,
        method: str,
        *args: Any,
        within: float | None = None,
        watched: bool = False,
    ) -> Any:
        """Call a method of the actor.

        Args:
            within: Seconds after which it hangs.
            watched: It may take long; whether it hangs is asked meanwhile.

        Raises:
            HostLost: It died, hangs or failed in a way that it has no words for.
            EnginePoolError: What it raises itself.
        """
        answer = asyncio.wrap_future(getattr(host.actor, method).remote(*args).future())
        # Looked at here: nobody may be left to, once the host is found to hang.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            if watched:
                await self._watch(host, answer)
            reply = await asyncio.wait_for(answer, within)
        except TimeoutError as error:
            why = f"no answer to {method} within hang_timeout={self._hang_timeout}"
            raise HostLost(why, end=True) from error
        except RayError as error:
            lines = str(error).strip().splitlines() or [repr(error)]
            returns = isinstance(error, ActorUnavailableError)
            raise HostLost(f"{type(error).__name__}: {lines[-1]}", returns=returns) from error
        if isinstance(reply, Refused):
            raise reply.error
        return reply

    async def _watch(self, host: HostLink, answer: asyncio.Future[Any]) -> None:
        while not answer.done():
            await asyncio.wait([answer], timeout=1.0)
            if not answer.done():
                await self.ask(host, "ping", within=self._hang_timeout)

    @property
    def waiting(self) -> int:
        """How many outputs no host has."""
        return len(self._waiting)

    def serving(self) -> list[HostLink]:
        return [host for host in self.hosts if host.state == "serving"]

    # Outputs

    async def check(self, prompts: Any, sampling_params: Any, options: Any) -> Any:
        """`Host.check`, on whichever host is there; waits for one."""
        while True:
            for host in self.serving():
                try:
                    return await self.ask(
                        host, "check", prompts, sampling_params, options, watched=True
                    )
                except HostLost as error:
                    _logger.debug("host %s did not check a call: %s", host.index, error)
            if self.closed or all(host.state == "failed" for host in self.hosts):
                raise self.failure()
            await asyncio.sleep(0.1)

    def submit(self, call: Call) -> None:
        if self.closed or all(host.state == "failed" for host in self.hosts):
            call.fail(self.failure())
            return
        if not call.outputs:
            call.close()
            return
        self._calls.add(call)
        for output in call.outputs:
            self._arrivals[output] = number = next(self._arrival)
            self._waiting[number] = output
        self.pump()

    def leave(self, call: Call, err_type: str, message: str) -> None:
        """End what of a call is not finished; it keeps what it has."""
        for host in self.hosts:
            keys = [key for key, output in host.running.items() if output.call is call]
            for key in keys:
                del host.running[key]
            if keys and host.state == "serving":
                self._spawn(self._tell(host, "cancel", keys))
        for output in call.outputs:
            self._waiting.pop(self._arrivals.get(output, -1), None)
            if not output.done:
                output.end(err_type, message)
        self._forget(call)
        self.pump()

    def pump(self) -> None:
        """Give out what waits."""
        ready = [h for h in self.serving() if h.number == self.number]
        if not ready or not self._waiting:
            return
        waiting = list(itertools.islice(self._waiting.items(), _WINDOW))
        entries = [
            Waiting(output.group, output.call.homes.get(output.group), output.alone)
            for _, output in waiting
        ]
        given: dict[int, list[Output]] = {}
        for position, index in assign([host.load() for host in ready], entries):
            number, output = waiting[position]
            del self._waiting[number]
            output.call.homes[output.group] = index
            given.setdefault(index, []).append(output)
        for index, outputs in given.items():
            host = self.hosts[index]
            items = []
            for output in outputs:
                key = next(self._keys)
                host.running[key] = output
                items.append(output.item(key))
            # A process that has just come back refuses them; `_listen` finds that out, too.
            self._spawn(self._tell(host, "submit", items, self.number))

    async def _tell(self, host: HostLink, method: str, *args: Any) -> Any:
        """`ask`, where `_listen` hears of it too if the host is lost."""
        try:
            return await self.ask(host, method, *args)
        except HostLost as error:
            _logger.debug("host %s: %s: %s", host.index, method, error)

    def _heard(self, host: HostLink, news: News) -> None:
        for key, result in news.finished:
            output = host.running.pop(key, None)
            if output is not None:
                output.call.finish(output, result)
                self._ended(output)
        for key, chunk in news.progress.items():
            output = host.running.get(key)
            if output is not None:
                output.latest = chunk
                output.call.show(output)
        for key, error in news.failed:
            output = host.running.get(key)
            if output is None:
                continue
            if isinstance(error, (PoolFailed, PoolClosed)):
                raise HostLost(f"its pool failed: {error}", end=True)
            del host.running[key]
            if isinstance(error, InvalidRequest):
                output.call.fail(error)
            else:
                output.end("host_error", str(error))
            self._ended(output)

    def _ended(self, output: Output) -> None:
        self._arrivals.pop(output, None)
        if all(other.done for other in output.call.outputs):
            self._forget(output.call)

    def _forget(self, call: Call) -> None:
        self._calls.discard(call)
        for output in call.outputs:
            self._arrivals.pop(output, None)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def on_all(
        self, method: str, *args: Any, hosts: Iterable[HostLink] | None = None
    ) -> dict[int, Any]:
        """Ask hosts at the same time; what each says, or its error, by host index."""
        asked = self.serving() if hosts is None else list(hosts)
        answers: list[Awaitable[Any]] = [
            self.ask(host, method, *args, watched=True) for host in asked
        ]
        said = await asyncio.gather(*answers, return_exceptions=True)
        return {host.index: one for host, one in zip(asked, said, strict=True)}
