"""Work for a client, as long as it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from fastapi import Request, Response


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
