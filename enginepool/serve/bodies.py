"""From a request's bytes to what FastAPI reads: checked first, and off the event loop if large.

pydantic looks at every token id, several times over, and no other thread runs meanwhile. So lists
of ids that are nothing but ids go past it: `with_ids` puts them where they belong.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers

from enginepool.serve.auth import sent_by_a_page
from enginepool.serve.error_replies import Refused
from enginepool.serve.prompt_limits import PromptLimits
from enginepool.serve.unknown_fields import check_names, check_query, names_of
from enginepool.values import described

_SMALL = 1 << 16  # bytes; a body of so many is read faster than a thread takes over
_READ_AT_ONCE = 2


class CheckedRoute(APIRoute):
    """Takes a JSON object, and a query, with names that the route knows, and not more of it than
    fits a prompt: everything else is refused before anything is made of it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = names_of(self.endpoint, "body")
        asked = names_of(self.endpoint, "query")
        # A reader's probe may say what it likes.
        acts = "POST" in self.methods or "admin" in self.tags
        generates = self.path.startswith(("/v1/", "/generate", "/inference/"))

        async def checked(request: Request) -> Response:
            if acts:
                check_query(request.query_params, asked)
            read = _Read(request.scope, request.receive)
            if request.method == "POST" and (content := await read.body()):
                _check_content_type(read.headers)
                limits: PromptLimits = request.app.state.prompt_limits
                threads: CapacityLimiter = request.app.state.readers
                if len(content) <= _SMALL:
                    read.value, ids = _parse(content, limits)
                else:
                    read.value, ids = await run_sync(_parse, content, limits, limiter=threads)
                request.state.ids = ids
                check_names(read.value, known, generates=generates)
            return await handle(read)

        return checked


def readers() -> CapacityLimiter:
    """Of the threads that read large bodies."""
    return CapacityLimiter(_READ_AT_ONCE)


def with_ids(body: Any, raw: Request) -> None:
    """Give a body that FastAPI has read the token ids that were sent."""
    for name, ids in getattr(raw.state, "ids", {}).items():
        setattr(body, name, ids)


class _Read(Request):
    value: Any = None

    async def json(self) -> Any:
        return self.value


def _check_content_type(headers: Headers) -> None:
    """JSON. A browser asks before another site's page may send that, but not before it sends what
    has no type; other clients may leave it out."""
    given = headers.get("content-type")
    if given is None and sent_by_a_page(headers):
        raise Refused(
            400, "the body has no type: from a page of a browser, send Content-Type: "
            "application/json"
        )  # fmt: skip
    kind = (given or "application/json").partition(";")[0].strip().lower()
    if not (kind.startswith("application/") and kind.endswith(("/json", "+json"))):
        raise Refused(
            400, f"the body is of type {kind!r}: send JSON, with Content-Type: application/json"
        )


def _parse(content: bytes, limits: PromptLimits) -> tuple[dict[str, Any], dict[str, Any]]:
    """The object without its long lists of ids, and those."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused(400, f"the body is {described(body)}: expected a JSON object")
    # As OpenAI's clients mean it, and its servers read it.
    body = {name: value for name, value in body.items() if value is not None}
    ids = limits.check_body(body)
    return {**body, **{name: [0] for name in ids}}, ids
