"""Administrators' routes that RL stacks call between rollouts: vLLM's names, and sglang's for
memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from enginepool.errors import InvalidRequest
from enginepool.runtime.quiesce import SwapMode
from enginepool.serve.admin_api import Done
from enginepool.serve.bodies import CheckedRoute
from enginepool.serve.openapi_schema import ADMIN_ERRORS

if TYPE_CHECKING:
    from enginepool.serve.service import Service

Tag = Literal["kv_cache", "weights", "cuda_graph"]
Tags = list[Tag] | None


def _merged_options[T: BaseModel](raw: Request, query: T, body: T | None) -> T:
    """The options of a request. vLLM has them in the query, its clients in the query or the body.

    Raises:
        InvalidRequest: One name is in both.
    """
    if body is None:
        return query
    if twice := raw.query_params.keys() & body.model_fields_set:
        raise InvalidRequest(f"{', '.join(sorted(twice))}: in the query and in the body; give one")
    return query.model_copy(update=body.model_dump(exclude_unset=True))


class PauseQuery(BaseModel, extra="forbid"):
    """`keep` lets running requests go on after `/resume`. With `clear_cache` their KV is computed
    again."""

    mode: Literal["abort", "wait", "keep"] = "abort"
    clear_cache: bool = True


class SleepQuery(BaseModel, extra="forbid"):
    """`level` 1 releases the KV cache, 2 the weights as well. `mode` is that of `/pause`."""

    level: int = Field(default=1, ge=1, le=2)
    mode: Literal["abort", "wait", "keep"] = "keep"


class WakeQuery(BaseModel, extra="forbid"):
    tags: Tags = None


class ResetQuery(BaseModel, extra="forbid"):
    """`reset_running_requests` changes nothing: running requests always compute their KV again.
    `reset_external` is refused: there is no external cache."""

    reset_running_requests: bool = False
    reset_external: bool = False


class WeightDir(BaseModel):
    """prime-rl's body."""

    weight_dir: str = Field(min_length=1)
    mode: SwapMode | None = None
    weight_version: int | str | None = None


class MemoryTags(BaseModel):
    """Without tags, all memory is meant. The tag `cuda_graph` is accepted and does nothing."""

    tags: Tags = None


class Status(Done):
    status: str = "ok"


def router(service: Service) -> APIRouter:
    routes = APIRouter(responses=ADMIN_ERRORS, tags=["admin"], route_class=CheckedRoute)
    admin = service.admin

    @routes.post("/pause")
    async def pause(
        raw: Request, query: Annotated[PauseQuery, Query()], body: PauseQuery | None = None
    ) -> Status:
        """Stop generating; new requests wait for `/resume`."""
        query = _merged_options(raw, query, body)
        await admin.pause_as_vllm(query.mode, clear_cache=query.clear_cache)
        return Status(status="paused")

    @routes.post("/resume")
    async def resume() -> Status:
        await admin.resume()
        return Status(status="resumed")

    @routes.post("/update_weights")
    async def update_weights(body: WeightDir) -> Status:
        """Load a checkpoint on every engine. Paused requests go on with the new weights."""
        await admin.reload(body.weight_dir, body.mode, body.weight_version)
        return Status()

    @routes.post("/reset_prefix_cache")
    async def reset_prefix_cache(
        raw: Request, query: Annotated[ResetQuery, Query()], body: ResetQuery | None = None
    ) -> Status:
        query = _merged_options(raw, query, body)
        if query.reset_external:
            raise InvalidRequest("reset_external=True: there is no cache elsewhere; leave it out")
        await admin.flush_cache()
        return Status()

    _memory_routes(routes, service)
    return routes


def _memory_routes(routes: APIRouter, service: Service) -> None:
    admin = service.admin

    @routes.post("/sleep")
    async def sleep(
        raw: Request, query: Annotated[SleepQuery, Query()], body: SleepQuery | None = None
    ) -> Status:
        """Release memory until `/wake_up`. Requests wait. If the weights are released, new requests
        get 503."""
        query = _merged_options(raw, query, body)
        await admin.sleep(query.mode, weights=query.level == 2)
        return Status(status="asleep")

    @routes.post("/wake_up")
    async def wake_up(
        raw: Request, query: Annotated[WakeQuery, Query()], body: WakeQuery | None = None
    ) -> Status:
        """The weights are read again from their checkpoint."""
        await admin.resume_memory(_merged_options(raw, query, body).tags)
        return Status(status="awake")

    @routes.post("/release_memory_occupation")
    async def release_memory_occupation(body: MemoryTags | None = None) -> Done:
        """sglang's route. Memory is released, and requests wait. If the weights are released, new
        requests get 503."""
        await admin.release_memory((body or MemoryTags()).tags)
        return Done()

    @routes.post("/resume_memory_occupation")
    async def resume_memory_occupation(body: MemoryTags | None = None) -> Done:
        """sglang's route. The weights are read again from their checkpoint."""
        await admin.resume_memory((body or MemoryTags()).tags)
        return Done()
