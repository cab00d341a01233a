"""The driver's side of one host."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.exceptions import (  # pyright: ignore[reportMissingImports]
    ActorUnavailableError,
    RayError,
)

from enginepool import PoolClosed, PoolFailed
from enginepool.ray.call import Output
from enginepool.ray.credits import HostLoad
from enginepool.ray.wire import ErrorReply


class HostLost(Exception):
    """A host does not answer, or its answer shows that it is broken.

    Attributes:
        end: Whether the host's process is still there, and must be ended.
        returns: Whether Ray is starting it again at this moment.
    """

    def __init__(self, message: str, *, end: bool = False, returns: bool = False) -> None:
        super().__init__(message)
        self.end = end
        self.returns = returns


class HostLink:
    """A host's actor, and the driver's knowledge of it.

    Attributes:
        state: "starting", "catching up", "serving" or "lost"; "failed" is for good.
        number: The update of weights that it has.
        running: The outputs that it was given, by the key of the attempt.
    """

    def __init__(self, index: int, actor: Any, hang_timeout: float | None) -> None:
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
        self.hang_timeout = hang_timeout

    def load(self) -> HostLoad:
        suspect = any(output.suspect for output in self.running.values())
        return HostLoad(self.index, self.slots, len(self.running), suspect)

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

    async def ask(
        self, method: str, *args: Any, within: float | None = None, watched: bool = False
    ) -> Any:
        """Call a method of the actor.

        Args:
            within: Seconds after which the host counts as hung.
            watched: Whether the call may take long. The host is pinged meanwhile.

        Raises:
            HostLost: The host died, hangs, or failed with an unexpected exception.
            EnginePoolError: The host raised it.
        """
        if not ray.is_initialized():  # this call would start a new cluster
            raise HostLost("Ray was shut down")
        answer = asyncio.wrap_future(getattr(self.actor, method).remote(*args).future())
        # Read the exception here. If the host hangs, nobody awaits this call, and asyncio would log
        # an exception that was never retrieved.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            if watched:
                await self._watch(answer)
            reply = await asyncio.wait_for(answer, within)
        except TimeoutError as error:
            why = f"no answer to {method} within hang_timeout={self.hang_timeout}"
            raise HostLost(why, end=True) from error
        except RayError as error:
            lines = str(error).strip().splitlines() or [repr(error)]
            returns = isinstance(error, ActorUnavailableError)
            raise HostLost(f"{type(error).__name__}: {lines[-1]}", returns=returns) from error
        if not isinstance(reply, ErrorReply):
            return reply
        if isinstance(reply.error, (PoolClosed, PoolFailed)):
            # Closed: the process has started again, and its pool is not open yet.
            end = isinstance(reply.error, PoolFailed)
            what = "has failed" if end else "is not open"
            raise HostLost(f"its pool {what}: {reply.error}", end=end)
        raise reply.error

    def kill(self, *, no_restart: bool) -> None:
        """End the host's process, if Ray is still there."""
        if ray.is_initialized():
            with contextlib.suppress(RayError):  # the host is of a cluster before this one
                ray.kill(self.actor, no_restart=no_restart)

    async def _watch(self, answer: asyncio.Future[Any]) -> None:
        while not answer.done():
            await asyncio.wait([answer], timeout=1.0)
            if not answer.done():
                await self.ask("ping", within=self.hang_timeout)
