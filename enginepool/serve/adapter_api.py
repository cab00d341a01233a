"""Administrators' routes for adapters: sglang's and vLLM's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field

from enginepool.runtime.quiesce import SwapMode
from enginepool.serve.bodies import CheckedRoute
from enginepool.serve.error_replies import Refused
from enginepool.serve.openapi_schema import ADMIN_ERRORS, Error, errors
from enginepool.values import shown

if TYPE_CHECKING:
    from enginepool.serve.service import Service

_VLLM_REPLIES = {
    **errors(400, 401, 403, 404, 408, 413, 500, 503, model=Error),
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
}


class AdapterName(BaseModel):
    lora_name: str = Field(min_length=1, max_length=256)


class AdapterFolder(AdapterName):
    """`mode` and `weight_version` as in `EnginePool.load_lora_adapter`."""

    lora_path: str = Field(min_length=1)
    mode: SwapMode = "drain"
    weight_version: int | str | None = None


class LoadAdapter(AdapterFolder):
    """sglang's body. An adapter of the same name is replaced. `pinned` accepts its default only."""

    pinned: Literal[False] = False


class LoadAdapterAsVllm(AdapterFolder):
    """vLLM's body. An adapter of the same name is replaced only if `load_inplace` is true."""

    load_inplace: bool = False


class LoadedAdapters(BaseModel):
    """sglang's reply. `loaded_adapters` has the folder of each adapter by its name."""

    success: bool = True
    error_message: str | None = None
    loaded_adapters: dict[str, str | None]


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["admin"], route_class=CheckedRoute)
    models = service.models

    def loaded() -> LoadedAdapters:
        found = {adapter.name: adapter.source for adapter in models.adapters()}
        return LoadedAdapters(loaded_adapters=found)

    @routes.post("/load_lora_adapter", responses=ADMIN_ERRORS)
    async def load_lora_adapter(body: LoadAdapter) -> LoadedAdapters:
        """Load an adapter on every engine, or on none if anything is wrong with it."""
        await models.load(body.lora_name, body.lora_path, body.mode, body.weight_version)
        return loaded()

    @routes.post("/unload_lora_adapter", responses=ADMIN_ERRORS)
    async def unload_lora_adapter(body: AdapterName) -> LoadedAdapters:
        """Remove an adapter. Requests that were sent before still finish with it."""
        await models.unload(body.lora_name)
        return loaded()

    @routes.post("/v1/load_lora_adapter", responses=_VLLM_REPLIES)
    async def load_as_vllm(body: LoadAdapterAsVllm) -> Response:
        """Load an adapter on every engine, or on none if anything is wrong with it."""
        await models.load(
            body.lora_name,
            body.lora_path,
            body.mode,
            body.weight_version,
            replace=body.load_inplace,
        )
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post("/v1/unload_lora_adapter", responses=_VLLM_REPLIES)
    async def unload_as_vllm(body: AdapterName) -> Response:
        """Remove an adapter. Requests that were sent before still finish with it."""
        if all(adapter.name != body.lora_name for adapter in models.adapters()):
            raise Refused(
                404, f"the lora adapter {shown(body.lora_name)} cannot be found", param="lora_name"
            )
        await models.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return routes
