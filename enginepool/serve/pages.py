"""The pages `/` (what the pool does) and `/docs` (its routes). Each is one file without data.

A page loads nothing from other hosts. It asks this server for data, with the reader's key.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse

PAGES = {"/": "page.html", "/docs": "docs.html"}


def router() -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def page() -> Response:
        return HTMLResponse(_read(PAGES["/"]))

    @routes.get("/docs")
    async def docs() -> Response:
        return HTMLResponse(_read(PAGES["/docs"]))

    return routes


@cache
def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
