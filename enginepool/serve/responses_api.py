"""`/v1/responses`: each request has the whole conversation, and is answered as a chat.

`/v1/embeddings` says why it is not served.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from anyio.to_thread import run_sync
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from enginepool.serve.bodies import CheckedRoute
from enginepool.serve.error_replies import Refused
from enginepool.serve.openai_serving import Chat
from enginepool.serve.openapi_schema import GENERATION_ERRORS, events
from enginepool.serve.responses_input import as_chat
from enginepool.serve.responses_models import ResponsesBody, ResponsesReply
from enginepool.serve.responses_output import Answer, Events

if TYPE_CHECKING:
    from enginepool.serve.exchange import Exchange
    from enginepool.serve.service import Service


class _Chat(Chat):
    def _request_id_prefix(self) -> str:
        return "resp_"


def router(service: Service) -> APIRouter:
    routes = APIRouter(route_class=CheckedRoute)
    reply = {**events(ResponsesReply), "description": "JSON, or OpenAI's server-sent events."}

    @routes.post("/v1/responses", responses={**GENERATION_ERRORS, 200: reply})
    async def responses(body: ResponsesBody, raw: Request) -> Response:
        """OpenAI's responses. None is kept, so the whole conversation is the input."""
        body.model = body.model or service.models.base
        exchange = service.exchange(raw)
        return await exchange.run(lambda: _reply(service, exchange, body, raw))

    return routes


def refusals() -> APIRouter:
    """Routes that clients look for and a pool does not have."""
    routes = APIRouter(include_in_schema=False)

    @routes.post("/v1/embeddings")
    async def embeddings() -> Response:
        raise Refused(
            404, "/v1/embeddings: the engines of a pool generate and score (/v1/score), they do "
            "not embed; send this to a server of an embedding model", code="not_served",
        )  # fmt: skip

    return routes


async def _reply(
    service: Service, exchange: Exchange, body: ResponsesBody, raw: Request
) -> Response:
    chat = as_chat(body)
    serving = _Chat(exchange, service.templates)  # pyright: ignore[reportArgumentType]
    made = await serving.reply(chat, raw)
    if made.status_code != 200:
        return made
    tokenizer = service.runtime.input_processor.tokenizer
    assert exchange.call is not None

    def tokens(text: str) -> int:
        return len(tokenizer.encode([text], special_tokens=False)[0])

    answer = Answer(body, chat, exchange.call, tokens)
    if isinstance(made, StreamingResponse):
        made.body_iterator = Events(answer).of(made.body_iterator)
        return made
    reply = await run_sync(lambda: orjson.dumps(answer.whole(orjson.loads(made.body))))
    return Response(reply, media_type="application/json")
