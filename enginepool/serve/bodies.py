"""From a request's bytes to what FastAPI reads: checked first, and off the event loop if large.

pydantic looks at every token id, several times over, and no other thread runs meanwhile. So lists
of ids that are nothing but ids go past it: `with_ids` puts them where they belong.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

import orjson
from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers

from enginepool.serve.error_replies import Refused
from enginepool.serve.openapi_schema import INTERNAL
from enginepool.serve.prompt_limits import PromptLimits
from enginepool.values import did_you_mean, shown

_SMALL = 1 << 16  # bytes; a body of so many is read faster than a thread takes over
_READ_AT_ONCE = 2
# What OpenAI's clients and sglang's router may say that asks for nothing else than what happens;
# and names for a client's own books.
_UNASKED: Mapping[str, Collection[Any]] = {
    "store": (False,),
    **dict.fromkeys(("background", "no_logs", "return_bytes", "return_entropy"), (False,)),
    "parallel_tool_calls": (True,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "return_hidden_states": (False,),
    "log_metrics": (True,),
}
_BOOKS = frozenset(("metadata", "safety_identifier", "prompt_cache_key"))


class CheckedRoute(APIRoute):
    """Takes a JSON object with names that the route knows, and not more of it than fits a prompt:
    everything else is refused before anything is made of it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = _names(self.endpoint)
        generates = self.path.startswith(("/v1/", "/generate", "/inference/"))

        async def checked(request: Request) -> Response:
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
                _check_names(read.value, known, generates=generates)
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
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
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
        raise Refused(400, f"the body is {shown(body)}: expected a JSON object")
    # As OpenAI's clients mean it, and its servers read it.
    body = {name: value for name, value in body.items() if value is not None}
    ids = limits.check_body(body)
    return {**body, **{name: [0] for name in ids}}, ids


def _check_names(body: dict[str, Any], known: Collection[str], *, generates: bool) -> None:
    for name in sorted(body.keys() - known):
        value = body[name]
        if generates and (name in _BOOKS or value in _UNASKED.get(name, ())):
            del body[name]
            continue
        takes = "" if known else ": nothing is taken here"
        hint = did_you_mean(name, known) if known else ""
        raise Refused(
            400,
            f"unknown field {name}={shown(value)}{takes or hint or '; it would have no effect'}",
            param=name,
        )


def _names(endpoint: Callable[..., Any]) -> frozenset[str]:
    """What a route's body may hold."""
    model = typing.get_type_hints(endpoint).get("body")
    (model, *_) = typing.get_args(model) or (model,)  # of `Model | None`
    if model is None:
        return frozenset()
    if dataclasses.is_dataclass(model):
        return frozenset(field.name for field in dataclasses.fields(model)) - INTERNAL
    return frozenset(model.model_fields)
