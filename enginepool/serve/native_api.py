"""sglang's own routes for requests and load, and the probes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from enginepool.serve.bodies import CheckedRoute, with_ids
from enginepool.serve.error_replies import Refused
from enginepool.serve.generate_body import GenerateBody
from enginepool.serve.openapi_schema import GENERATION_ERRORS, errors, events

if TYPE_CHECKING:
    from enginepool.serve.exchange import Exchange
    from enginepool.serve.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter(route_class=CheckedRoute)

    @routes.post("/generate", responses={**GENERATION_ERRORS, 200: events()})
    async def generate(body: GenerateBody, raw: Request) -> Response:
        """sglang's: generates from texts or token ids."""
        with_ids(body, raw)
        exchange = service.exchange(raw)
        return await exchange.run(lambda: _reply(exchange, body))

    @routes.get("/get_load", responses=errors(401))
    async def get_load(raw: Request) -> list[dict[str, Any]]:
        """Running requests and KV use of each engine."""
        return await service.front_of(raw).get_load()

    @routes.get("/status", responses=errors(401))
    async def status() -> dict[str, Any]:
        """The data of the page: engines, load, and the last minutes."""
        return service.status()

    @routes.get("/health", response_class=PlainTextResponse)
    async def health() -> Response:
        """Whether the server runs."""
        return PlainTextResponse("ok")

    @routes.get("/ready", response_class=PlainTextResponse, responses=errors(503))
    async def ready(raw: Request) -> Response:
        """Whether an engine can serve now (on an engine's own port: that engine)."""
        if (reason := service.not_ready(raw)) is not None:
            raise Refused(503, reason, retry_after=1)
        return PlainTextResponse("ok")

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), media_type=service.metrics.content_type)

    return routes


async def _reply(exchange: Exchange, body: GenerateBody) -> Response:
    await exchange.begin(body)
    if body.stream:
        return exchange.stream(_events(exchange.generate_request(body)))
    result = await anext(exchange.generate_request(body))
    return Response(_json(result), media_type="application/json")


async def _events(outputs: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    async for output in outputs:
        yield b"data: " + _json(output) + b"\n\n"


def _json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
