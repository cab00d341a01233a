"""The page at `/`: one file, nothing loaded from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def read_page() -> str:
    return resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
