"""OpenAI's routes, sglang's `/v1/score`, and the name of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from sgl_jax.srt.entrypoints.openai.protocol import ScoringResponse

from enginepool.serve.bodies import CheckedRoute, with_ids
from enginepool.serve.error_replies import Refused
from enginepool.serve.openai_models import (
    ChatBody,
    ChatReply,
    CompletionBody,
    CompletionReply,
    ScoreBody,
    ServedModelCard,
    ServedModelList,
)
from enginepool.serve.openai_serving import Chat, Completion, Score, check_upstream
from enginepool.serve.openapi_schema import GENERATION_ERRORS, NOT_FOUND, errors, events

if TYPE_CHECKING:
    from enginepool.serve.service import Service


def router(service: Service) -> APIRouter:
    """
    Raises:
        EnginePoolError: Upstream's serving classes lack a method that is used here.
    """
    check_upstream()
    routes = APIRouter(route_class=CheckedRoute)

    @routes.post(
        "/v1/completions",
        responses={**GENERATION_ERRORS, 200: events(CompletionReply)},
    )
    async def completions(body: CompletionBody, raw: Request) -> Response:
        """OpenAI's text completion; `seed` is upstream's `sampling_seed`."""
        with_ids(body, raw)
        body.model = body.model or service.models.base
        exchange = service.exchange(raw)
        serving = Completion(exchange, service.templates)  # pyright: ignore[reportArgumentType]
        return await exchange.run(lambda: serving.reply(body, raw))

    @routes.post(
        "/v1/chat/completions",
        responses={**GENERATION_ERRORS, 200: events(ChatReply)},
    )
    async def chat_completions(body: ChatBody, raw: Request) -> Response:
        """OpenAI's chat completion, by the checkpoint's chat template."""
        body.model = body.model or service.models.base
        exchange = service.exchange(raw)
        serving = Chat(exchange, service.templates)  # pyright: ignore[reportArgumentType]
        return await exchange.run(lambda: serving.reply(body, raw))

    @routes.post("/v1/score", response_model=ScoringResponse, responses=GENERATION_ERRORS)
    async def score(body: ScoreBody, raw: Request) -> Response:
        """sglang's: the probability of each label as the next token, after query and item."""
        with_ids(body, raw)
        body.model = body.model or service.models.base
        exchange = service.score_exchange(raw)
        serving = Score(exchange)  # pyright: ignore[reportArgumentType]
        return await exchange.run(lambda: serving.reply(body, raw))

    @routes.get("/v1/models", responses=errors(401))
    async def models() -> ServedModelList:
        """The model that is served, and its adapters."""
        return ServedModelList(data=_cards(service))

    @routes.get("/v1/models/{model:path}", responses=NOT_FOUND)
    async def model(model: str) -> ServedModelCard:
        cards = {card.id: card for card in _cards(service)}
        if model not in cards:
            served = ", ".join(cards)
            raise Refused(
                404, f"the model {model!r} is not served here; served: {served}", param="model"
            )
        return cards[model]

    return routes


def _cards(service: Service) -> list[ServedModelCard]:
    base, longest = service.models.base, service.runtime.input_processor.limits.total
    of = {base: (service.admin.model_path, None)}
    of |= {adapter.name: (adapter.source, base) for adapter in service.models.adapters()}
    return [
        ServedModelCard(id=name, root=root, parent=parent, max_model_len=longest)
        for name, (root, parent) in of.items()
    ]
