"""Connections: closed if request headers do not come in time, logged if dropped, watched while a
request is served.

uvicorn only limits the time between two requests.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response

from enginepool.logs import logger

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as AutoHTTPProtocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol


_LOOK_SECONDS = 1.0


class Descriptors:
    """Logs when no file descriptor is left: libuv then closes new connections silently."""

    def __init__(self) -> None:
        self._none_left = False

    async def keep(self) -> None:
        """Look every second until cancelled. Looking at new connections is not enough, because open
        files take descriptors too."""
        while True:
            self.look()
            await asyncio.sleep(_LOOK_SECONDS)

    def look(self) -> None:
        none_left = False
        try:
            socket.socket().close()
        except OSError as error:
            none_left = error.errno in (errno.EMFILE, errno.ENFILE)
        if none_left and not self._none_left:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            logger().warning(
                "enginepool.connections_dropped",
                why="no file descriptor is left: new connections are closed until some are free",
                limit=limit,
                remedy="ulimit -n",
            )
        self._none_left = none_left


def protocol_with_header_timeout(
    seconds: float, on_connection: Callable[[], None]
) -> type[asyncio.Protocol]:
    """uvicorn's protocol with a limit on how long the headers of a request may take to come. Time
    counts from the connection's beginning, or from the request's first byte."""

    class HeaderTimeoutProtocol(AutoHTTPProtocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            on_connection()
            self._start()

        def data_received(self, data: bytes) -> None:
            if self._timer is None and self._waits():
                self._start()
            super().data_received(data)
            if not self._waits():
                self._stop()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _waits(self) -> bool:
            """Whether no request is being answered."""
            return self.cycle is None or self.cycle.response_complete

        def _start(self) -> None:
            self._timer = self.loop.call_later(seconds, self._late)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _late(self) -> None:
            self._timer = None
            self.transport.close()

    return HeaderTimeoutProtocol


async def while_present(raw: Request, work: Awaitable[Response]) -> Response | None:
    """Await `work` while the client is there; cancel it, and return None, when it leaves."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_left(raw))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _left(raw: Request) -> None:
    while (await raw.receive())["type"] != "http.disconnect":
        pass
