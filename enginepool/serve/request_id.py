"""`x-request-id`, the client's or a new one: in the reply and in every log line of the request."""

from __future__ import annotations

import re
import uuid

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from enginepool.values import nothing_quoted

HEADER = "x-request-id"
_FIT = re.compile(r"[!-~]{1,128}")  # safe in a log and in a header


class RequestId:
    """The outermost middleware. Inside it, errors quote no prompts."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        one = given if _FIT.fullmatch(given) else uuid.uuid4().hex

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = one
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=one), nothing_quoted():
            await self.app(scope, receive, named)


def current() -> str | None:
    """The id of the request that is being served."""
    return structlog.contextvars.get_contextvars().get("request_id")
