"""The FastAPI application of a server. Imports sgl_jax: for an open pool only."""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from enginepool.errors import EnginePoolError
from enginepool.serve import (
    adapter_api,
    admin_api,
    info_api,
    lifecycle_api,
    native_api,
    openai_api,
    pages,
    responses_api,
    token_api,
)
from enginepool.serve.auth import Guard
from enginepool.serve.bodies import readers
from enginepool.serve.error_replies import as_refused, error_reply
from enginepool.serve.openapi_schema import as_served
from enginepool.serve.request_limits import BodyLimit
from enginepool.serve.service import Service


def make_app(service: Service) -> FastAPI:
    """All routes, behind one guard. Administrators' routes are left out unless enabled."""
    # FastAPI's documentation pages would load scripts from other hosts.
    app = FastAPI(
        title="enginepool",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=_operation_id,
    )
    # CheckedRoute reads these two.
    app.state.prompt_limits, app.state.readers = service.prompt_limits, readers()
    app.include_router(openai_api.router(service))
    app.include_router(responses_api.router(service))
    app.include_router(responses_api.refusals())
    app.include_router(native_api.router(service))
    app.include_router(token_api.router(service))
    app.include_router(info_api.router(service))
    app.include_router(pages.router())
    admin_paths: set[str] = set()
    apis = admin_api.router, admin_api.sglang_router, lifecycle_api.router, adapter_api.router
    for api in apis:
        routes = api(service)
        admin_paths |= {route.path for route in routes.routes if isinstance(route, APIRoute)}
        if service.options.enable_admin:
            app.include_router(routes)

    def refuse(path: str, error: Exception) -> Response:
        refused = as_refused(error)
        service.refused(path, refused)
        # vLLM's routes for administrators (`/v1/…`) have OpenAI's errors.
        return error_reply(refused, admin=path in admin_paths and not path.startswith("/v1/"))

    async def failed(request: Request, error: Exception) -> Response:
        return refuse(request.scope["path"], error)

    kinds = EnginePoolError, RequestValidationError, HTTPException, ClientDisconnect, Exception
    for kind in kinds:
        app.add_exception_handler(kind, failed)
    app.add_middleware(
        BodyLimit,
        limit=service.options.max_body_bytes,
        seconds=service.options.body_timeout,
        refuse=refuse,
    )
    app.add_middleware(
        Guard,
        options=service.options,
        admin_paths=frozenset(admin_paths),
        refuse=refuse,
    )
    _document(app)
    return app


def _operation_id(route: APIRoute) -> str:
    (method,) = route.methods
    return f"{method.lower()}{re.sub(r'[^a-z0-9]+', '_', route.path)}"


def _document(app: FastAPI) -> None:
    plain = app.openapi

    def document() -> dict[str, Any]:
        made = app.openapi_schema is None
        return as_served(plain()) if made else plain()

    app.openapi = document  # FastAPI's documented way to change the document
