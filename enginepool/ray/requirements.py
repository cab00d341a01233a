"""Checks the packages that Ray needs in the driver's environment."""

from __future__ import annotations

from enginepool import InvalidConfig
from patches.overwritten_msgpack import find_overwritten


def check() -> None:
    """Raises InvalidConfig, with the command that repairs it."""
    if (found := find_overwritten()) is not None:
        problem, remedy = found
        raise InvalidConfig(f"{problem}; run: {remedy}")
