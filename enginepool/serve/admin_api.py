"""Administrators' routes: `/admin/…`, as another project's scripts call them, and sglang's names
for the same operations. `enginepool reference` repeats these scripts (docs/command_line.md)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from enginepool.dispatch.condition import PauseMode
from enginepool.errors import InvalidRequest
from enginepool.runtime.quiesce import SwapMode
from enginepool.serve.bodies import CheckedRoute
from enginepool.serve.openapi_schema import ADMIN_ERRORS

if TYPE_CHECKING:
    from enginepool.serve.service import Service

_UINT32 = (1 << 32) - 1


class Done(BaseModel):
    ok: bool = True


class ReloadStatus(BaseModel):
    """`model_path` is the source of the weights that are served."""

    reloading: bool
    last_ok: bool | None
    last_error: str | None
    model_path: str
    weight_version: int | str


class Checksum(Done):
    """`checksum` is the sum of a few elements, as `enginepool reference` prints it. `fingerprint`
    covers every byte of every engine."""

    checksum: float
    fingerprint: str


class Perturb(BaseModel):
    seed: int = Field(default=0, ge=0, le=_UINT32)
    scale: float = Field(default=1e-3, ge=0, le=1, allow_inf_nan=False)
    num_leaves: int = Field(default=1, ge=1)


class Perturbed(Done):
    elapsed_sec: float
    num_leaves: int
    checksum_before: float
    checksum_after: float
    checksum_delta: float


class Reload(BaseModel):
    """`mode` says what becomes of running requests, as in `EnginePool.update_weights`. Without it
    they finish first; paused ones go on with the new weights."""

    model_path: str = Field(min_length=1)
    mode: SwapMode | None = None
    weight_version: int | str | None = None


class Reloaded(Done):
    model_path: str
    elapsed_sec: float
    report: dict[str, Any]


class Pause(BaseModel):
    mode: PauseMode = "retract"


class MemoryReport(Done):
    memory: dict[str, Any]


class FromDisk(BaseModel):
    """sglang's fields, and `mode` as in `/admin/reload_weights`. The last five fields change
    nothing. Each accepts only the value that says what a pool does anyway."""

    model_path: str = Field(min_length=1)
    weight_version: int | str | None = None
    abort_all_requests: bool = False
    mode: SwapMode | None = None
    load_format: Literal["auto"] | None = None
    flush_cache: Literal[True] = True
    is_async: Literal[False] = False
    keep_pause: Literal[False] = False
    torch_empty_cache: Literal[False] = False


class Updated(BaseModel):
    success: bool = True
    message: str
    num_paused_requests: int = 0


class PauseAsSglang(BaseModel):
    mode: PauseMode = "abort"


class StatusMessage(BaseModel):
    message: str
    status: str = "ok"


class Abort(BaseModel):
    rid: str | None = None
    abort_all: bool = False


class WeightsByName(BaseModel, extra="forbid"):
    name: str
    truncate_size: int = Field(default=100, ge=0)


def router(service: Service) -> APIRouter:
    """The routes `/admin/…`."""
    routes = APIRouter(
        prefix="/admin", responses=ADMIN_ERRORS, tags=["admin"], route_class=CheckedRoute
    )
    admin = service.admin

    @routes.get("/reload_status")
    async def reload_status() -> ReloadStatus:
        return ReloadStatus(
            reloading=admin.reloading,
            last_ok=admin.last_ok,
            last_error=admin.last_error,
            model_path=admin.model_path,
            weight_version=service.runtime.desired.weight_version,
        )

    @routes.get("/weights_checksum")
    async def weights_checksum() -> Checksum:
        checksum = await admin.checksum()
        return Checksum(checksum=checksum, fingerprint=await service.pool.async_checksum())

    @routes.post("/perturb_weights")
    async def perturb_weights(body: Perturb | None = None) -> Perturbed:
        """Add the same noise to the first leaves of every engine."""
        body = body or Perturb()
        return Perturbed(**await admin.perturb(body.seed, body.scale, body.num_leaves))

    @routes.post("/reload_weights")
    async def reload_weights(body: Reload) -> Reloaded:
        """Load a checkpoint on every engine, or on none if anything is wrong with it."""
        started = time.perf_counter()
        report = await admin.reload(body.model_path, body.mode, body.weight_version)
        return Reloaded(
            model_path=body.model_path,
            elapsed_sec=time.perf_counter() - started,
            report=report.to_dict(),
        )

    @routes.post("/pause")
    async def pause(body: Pause | None = None) -> Done:
        await admin.pause((body or Pause()).mode)
        return Done()

    @routes.post("/continue")
    async def resume() -> Done:
        await admin.resume()
        return Done()

    @routes.post("/flush_cache")
    async def flush_cache() -> Done:
        await admin.flush_cache()
        return Done()

    @routes.get("/memory")
    async def memory() -> MemoryReport:
        return MemoryReport(memory=service.pool.stats()["memory"])

    return routes


def sglang_router(service: Service) -> APIRouter:
    """sglang's names and replies."""
    routes = APIRouter(responses=ADMIN_ERRORS, tags=["admin"], route_class=CheckedRoute)
    admin = service.admin

    @routes.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: FromDisk) -> Updated:
        mode = "abort" if body.abort_all_requests else body.mode
        if body.mode not in (None, mode):
            raise InvalidRequest(
                f"mode={body.mode!r} with abort_all_requests, which is mode='abort': give one"
            )
        report = await admin.reload(body.model_path, mode, body.weight_version)
        return Updated(message=f"weight version {report.weight_version!r} from {body.model_path}")

    @routes.post("/pause_generation")
    async def pause_generation(body: PauseAsSglang | None = None) -> StatusMessage:
        await admin.pause((body or PauseAsSglang()).mode)
        return StatusMessage(message="Generation is paused.")

    @routes.post("/continue_generation")
    async def continue_generation() -> StatusMessage:
        await admin.resume()
        return StatusMessage(message="Generation goes on.")

    @routes.get("/flush_cache")
    @routes.post("/flush_cache")
    async def flush_cache() -> Done:
        await admin.flush_cache()
        return Done()

    @routes.post("/abort_request")
    async def abort_request(body: Abort) -> Done:
        """End the requests with exactly this id, or all."""
        rid = None if body.abort_all and not body.rid else body.rid  # verl sends an empty one
        await service.pool.async_abort_request(rid, abort_all=body.abort_all)
        service.exchanges.abort(rid)
        return Done()

    @routes.get("/get_weights_by_name")
    async def get_weights_by_name(query: Annotated[WeightsByName, Query()]) -> list[Any]:
        return await service.pool.async_get_weights_by_name(query.name, query.truncate_size)

    @routes.post("/get_weights_by_name")
    async def post_weights_by_name(body: WeightsByName) -> list[Any]:
        return await service.pool.async_get_weights_by_name(body.name, body.truncate_size)

    return routes
