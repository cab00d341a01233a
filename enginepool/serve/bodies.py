"""Reads and checks a request's body before FastAPI does. A large body is read on a thread.

pydantic looks at every token id several times and holds the GIL meanwhile. So lists of token ids do
not go through it: `with_ids` puts them into the model afterwards.
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

_SMALL = 1 << 16  # bytes; reading them takes less time than starting a thread
_READ_AT_ONCE = 2


class CheckedRoute(APIRoute):
    """Takes a JSON object and a query whose names the route knows.

    A body that is too large for any prompt is refused before pydantic reads it.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = names_of(self.endpoint, "body")
        asked = names_of(self.endpoint, "query")
        # Probes may have any query.
        checks_query = "POST" in self.methods or "admin" in self.tags
        generates = self.path.startswith(("/v1/", "/generate", "/inference/"))
        generates = generates and "admin" not in self.tags

        async def checked(request: Request) -> Response:
            if checks_query:
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
    """Limits the threads that read large bodies."""
    return CapacityLimiter(_READ_AT_ONCE)


def with_ids(body: Any, raw: Request) -> None:
    """Put the token ids that were sent into a body that FastAPI has read."""
    for name, ids in getattr(raw.state, "ids", {}).items():
        setattr(body, name, ids)


class _Read(Request):
    value: Any = None

    async def json(self) -> Any:
        return self.value


def _check_content_type(headers: Headers) -> None:
    """Refuse what is not JSON.

    A browser asks this server first if a page of another site sends JSON (CORS preflight). It does
    not ask first if the body has no type. Other clients may leave the type out.
    """
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
    """The object with a short list in the place of each list of token ids, and these lists."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused(400, f"the body is {described(body)}: expected a JSON object")
    # Null counts as left out, as in OpenAI's servers.
    body = {name: value for name, value in body.items() if value is not None}
    ids = limits.check_body(body)
    short = {name: [[0]] if isinstance(value[0], list) else [0] for name, value in ids.items()}
    return {**body, **short}, ids
