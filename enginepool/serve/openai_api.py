"""OpenAI's routes: upstream's serving classes, one object a request, over an exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Request, Response
from sgl_jax.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    ModelCard,
    ModelList,
)
from sgl_jax.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sgl_jax.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion

from enginepool.errors import EnginePoolError, InvalidRequest
from enginepool.serve.error_replies import Refused
from enginepool.serve.handler import Exchange
from enginepool.serve.openapi_schema import GENERATION_ERRORS, NOT_FOUND, events
from enginepool.serve.request_limits import CheckedRoute

if TYPE_CHECKING:
    from enginepool.serve.service import Service

# Fields that upstream's models have and its classes or the pool do nothing with.
_UNSERVED = (
    "suffix",
    "return_hidden_states",
    "return_routed_experts",
    "session_params",
    "lora_path",
    "dp_rank",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "disagg_prefill_dp_rank",
    "disagg_transfer_id",
)


class _Serving:
    """What both of upstream's classes do differently here. An error is raised and becomes the
    reply's status, where upstream answers 500, or 200 with an error in the stream."""

    async def reply(self: Any, body: Any, raw: Request) -> Response:
        if message := self._validate_request(body):
            raise InvalidRequest(message)
        _check_fields(body)
        exchange: Exchange = self.tokenizer_manager
        if isinstance(body, ChatCompletionRequest):
            _check_template_options(body, await raw.json(), exchange.tokenizer.template_options)
        adapted = await run_sync(self._adapt, body, limiter=exchange.tokenizer.limiter)
        await exchange.begin(adapted, self._request_id_prefix())
        if body.stream:
            streamed = await self._handle_streaming_request(adapted, body, raw)
            return exchange.stream(streamed.body_iterator)
        made = await self._handle_non_streaming_request(adapted, body, raw)
        if exchange.failure is not None:
            raise exchange.failure
        if isinstance(made, Response):
            return made
        return Response(made.model_dump_json(), media_type="application/json")

    def _adapt(self: Any, body: Any) -> Any:
        """Upstream's GenerateReqInput for a body: it applies the chat template and encodes."""
        try:
            adapted, _ = self._convert_to_internal_request(body)
        except EnginePoolError:
            raise
        # Templates and parsers fail in ways of their own over what they are given.
        except Exception as error:
            raise InvalidRequest(
                f"this request cannot be turned into a prompt: {type(error).__name__}: {error}"
            ) from error
        if body.seed is not None:
            adapted.sampling_params["sampling_seed"] = body.seed  # upstream drops it
        return adapted


class Completion(_Serving, OpenAIServingCompletion):
    pass


class Chat(_Serving, OpenAIServingChat):
    def _process_logprobs_tokens(self, logprobs: Any, use_token_index: bool = False) -> Any:
        # A chunk of a stream may hold several tokens; upstream gives all the first one's.
        return super()._process_logprobs_tokens(logprobs, use_token_index=True)


def router(service: Service) -> APIRouter:
    routes = APIRouter(route_class=CheckedRoute)

    @routes.post(
        "/v1/completions",
        responses={**GENERATION_ERRORS, 200: events(CompletionResponse)},
    )
    async def completions(body: CompletionRequest, raw: Request) -> Response:
        """OpenAI's text completion; `seed` is upstream's `sampling_seed`."""
        exchange = service.exchange(raw)
        serving = Completion(exchange, service.templates)  # pyright: ignore[reportArgumentType]
        return await exchange.run(lambda: serving.reply(body, raw))

    @routes.post(
        "/v1/chat/completions",
        responses={**GENERATION_ERRORS, 200: events(ChatCompletionResponse)},
    )
    async def chat_completions(body: ChatCompletionRequest, raw: Request) -> Response:
        """OpenAI's chat completion, by the checkpoint's chat template."""
        exchange = service.exchange(raw)
        serving = Chat(exchange, service.templates)  # pyright: ignore[reportArgumentType]
        return await exchange.run(lambda: serving.reply(body, raw))

    @routes.get("/v1/models")
    async def models() -> ModelList:
        """The one model that is served."""
        return ModelList(data=[_card(service)])

    @routes.get("/v1/models/{model:path}", responses=NOT_FOUND)
    async def model(model: str) -> ModelCard:
        card = _card(service)
        if model != card.id:
            raise Refused(
                404, f"the model {model!r} is not served here, {card.id!r} is", param="model"
            )
        return card

    return routes


def _card(service: Service) -> ModelCard:
    front = service.front
    name = front.served_model_name or front.model_path
    return ModelCard(id=name, root=name, max_model_len=front.model_config.context_len)


def _check_fields(body: Any) -> None:
    """Errors instead of silence."""
    for name in _UNSERVED:
        if getattr(body, name, None):
            raise Refused(400, f"{name} is not supported in a pool", param=name)
    best_of = getattr(body, "best_of", None)
    if best_of is not None and best_of != body.n:
        raise Refused(
            400, f"best_of={best_of}: all n={body.n} samples are returned; leave it out",
            param="best_of",
        )  # fmt: skip
    if getattr(body, "echo", False) and body.logprobs is not None:
        raise Refused(
            400, "echo=True with logprobs: a pool gives log-probabilities of outputs only",
            param="echo",
        )  # fmt: skip
    if getattr(body, "prompt", None) == []:
        raise Refused(400, "prompt=[]: there is no prompt", param="prompt")
    if vars(body)["max_tokens"] == 0:  # its attribute warns: OpenAI calls it deprecated
        raise Refused(400, "max_tokens=0: expected 1 or more", param="max_tokens")


def _check_template_options(body: Any, given: dict[str, Any], names: set[str]) -> None:
    """The template is the checkpoint's: a client's would run here, for as long as it likes."""
    for name in body.chat_template_kwargs or ():
        if name in names:
            raise Refused(
                400,
                f"chat_template_kwargs: {name!r} is not a variable of the template and not a "
                "client's to set; leave it out",
                param="chat_template_kwargs",
            )
    for name in names.intersection(given) - type(body).model_fields.keys():
        raise Refused(400, f"{name} is not a client's to set; leave it out", param=name)
