"""Routes that only read: what is served, by which engines, and whether they work.

sglang's and vLLM's names and forms.
"""

from __future__ import annotations

import dataclasses
import json
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel

from enginepool.runtime import statistics
from enginepool.serve.bodies import CheckedRoute
from enginepool.serve.error_replies import Refused
from enginepool.serve.openapi_schema import errors
from enginepool.serve.probe import check_engines

if TYPE_CHECKING:
    from enginepool.serve.service import Service

# Arguments whose names contain one of these are secrets, and are not shown.
_SECRET = ("secret", "password", "api_key", "keyfile")


class ModelInfo(BaseModel):
    model_path: str
    tokenizer_path: str | None
    is_generation: bool
    preferred_sampling_params: str | None
    weight_version: int | str


class WeightVersion(BaseModel):
    weight_version: int | str


class Version(BaseModel):
    """`version` is this package's."""

    version: str
    sglang_jax: str


class Load(BaseModel):
    """The load of one engine. Requests wait in one queue for all engines. So `num_waiting_reqs` is
    the engine's share of them."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float


class Loads(BaseModel):
    timestamp: float
    dp_rank_count: int
    loads: list[Load]


class Sleeping(BaseModel):
    is_sleeping: bool


class Paused(BaseModel):
    is_paused: bool


def router(service: Service) -> APIRouter:
    routes = APIRouter(route_class=CheckedRoute, responses=errors(401))

    @routes.get("/get_model_info")
    @routes.get("/model_info")
    async def model_info() -> ModelInfo:
        args = service.front.server_args
        return ModelInfo(
            model_path=service.admin.model_path,
            tokenizer_path=args.tokenizer_path,
            is_generation=True,
            preferred_sampling_params=args.preferred_sampling_params,
            weight_version=service.runtime.desired.weight_version,
        )

    @routes.get("/get_weight_version")
    @routes.get("/weight_version")
    async def weight_version() -> WeightVersion:
        return WeightVersion(weight_version=service.runtime.desired.weight_version)

    @routes.get("/get_server_info")
    @routes.get("/server_info")
    async def server_info(raw: Request) -> dict[str, Any]:
        """Upstream's ServerArgs of the engines, and what each engine does now."""
        front = service.front_of(raw)
        return {
            **_without_secrets(dataclasses.asdict(front.server_args)),
            "weight_version": service.runtime.desired.weight_version,
            "internal_states": await front.get_internal_state(),
            "version": version("sglang-jax"),
        }

    @routes.get("/version")
    async def versions() -> Version:
        return Version(version=version("enginepool"), sglang_jax=version("sglang-jax"))

    @routes.get("/v1/loads")
    async def loads(raw: Request) -> Loads:
        """sglang's: requests and KV cache of each engine."""
        return _loads(service, raw)

    _state_routes(routes, service)
    return routes


def _state_routes(routes: APIRouter, service: Service) -> None:
    """The present state of the engines."""

    @routes.get("/is_sleeping")
    async def is_sleeping() -> Sleeping:
        """Whether the memory of the weights or of the KV cache is released."""
        desired = service.runtime.desired
        asleep = desired.no_weights is not None or "kv_cache" in desired.pause_reasons
        return Sleeping(is_sleeping=asleep)

    @routes.get("/is_paused")
    async def is_paused() -> Paused:
        """Whether any engine is paused."""
        return Paused(is_paused=service.runtime.desired.paused)

    @routes.get("/health_generate", response_class=PlainTextResponse, responses=errors(503))
    async def health_generate(raw: Request) -> Response:
        """Whether every engine generates now (on an engine's own port: that engine)."""
        if service.exchanges.draining:
            raise Refused(503, "the server is shutting down")
        await check_engines(service.runtime, service.engine_of(raw))
        return PlainTextResponse("ok")


def _loads(service: Service, raw: Request) -> Loads:
    workers = service.runtime.workers
    waiting, only = service.runtime.dispatch.waiting, service.engine_of(raw)
    each = []
    for index, worker in enumerate(workers):
        if only not in (None, index):
            continue
        load = statistics.load(worker)
        share = waiting // len(workers) + (index < waiting % len(workers))
        used, capacity = load["kv_used_tokens"], load["kv_total_tokens"]
        each.append(
            Load(
                dp_rank=index,
                num_running_reqs=load["running"],
                num_waiting_reqs=share,
                num_total_reqs=load["running"] + share,
                num_used_tokens=used,
                max_total_num_tokens=capacity,
                token_usage=used / capacity if capacity else 0.0,
            )
        )
    return Loads(timestamp=time.time(), dp_rank_count=len(each), loads=each)


def _without_secrets(args: dict[str, Any]) -> dict[str, Any]:
    """ServerArgs without secrets, as JSON."""
    told = {k: v for k, v in args.items() if not any(part in k for part in _SECRET)}
    return json.loads(json.dumps(told, default=str))
