"""How large a request may be: its body, its prompts, its samples. A prompt: `prompt_limits`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from enginepool.errors import InvalidRequest
from enginepool.serve.error_replies import Refused, error_reply
from enginepool.serve.options import ServeOptions

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class BodyLimit:
    """Refuses bodies of more than `limit` bytes, by their announced length or as they come."""

    def __init__(self, app: ASGIApp, limit: int, told: Callable[[str, Refused], None]) -> None:
        self.app = app
        self._told = told
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > self._limit:
            refused = Refused(413, self._message(f"{announced} bytes"))
            self._told(scope["path"], refused)
            await error_reply(refused)(scope, receive, send)
            return
        await self.app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                # The one exception that FastAPI hands on while it reads a body.
                raise HTTPException(413, self._message(f"{seen} bytes or more"))
            return message

        return counted

    def _message(self, size: str) -> str:
        return f"the body has {size}: at most {self._limit} are taken (--max-body-bytes)"


class CheckedRoute(APIRoute):
    """Refuses, before anything is made of it, a body that is too much for a prompt, and strings
    that no reply could repeat: JSON can spell what UTF-8 cannot hold."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            return await handle(_CheckedRequest(request.scope, request.receive))

        return checked


class _CheckedRequest(Request):
    async def json(self) -> Any:
        if hasattr(self, "_json"):
            return self._json
        value = await super().json()
        try:
            self.app.state.prompt_limits.check_body(value)
        except InvalidRequest as error:
            # The one exception that FastAPI hands on while it reads a body.
            raise HTTPException(400, str(error)) from None
        if _SURROGATE.search(await self.body()):
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                raise HTTPException(400, "the body has half of a surrogate pair") from None
        return value


def check_counts(obj: Any, prompts: int, options: ServeOptions) -> None:
    """Bound what one body can ask for."""
    if not prompts:
        raise InvalidRequest("there is no prompt")
    if prompts > options.max_prompts:
        raise InvalidRequest(
            f"{prompts} prompts: at most {options.max_prompts} are taken in one request "
            "(--max-prompts)"
        )
    params = obj.sampling_params
    for one in params if isinstance(params, list) else [params]:
        n = one.get("n") if isinstance(one, Mapping) else None
        if isinstance(n, int) and n > options.max_n:
            raise InvalidRequest(f"n={n}: at most {options.max_n} are sampled (--max-n)")


def count_prompts(obj: Any) -> int:
    """How many prompts upstream's GenerateReqInput has."""
    if obj.text is not None:
        return 1 if isinstance(obj.text, str) else len(obj.text)
    ids = obj.input_ids
    if not ids:
        return 0
    return 1 if isinstance(ids[0], int) else len(ids)
