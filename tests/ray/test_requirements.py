"""A module that another package has overwritten is noticed by the pool that needs it and by the
doctor."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from enginepool import InvalidConfig
from enginepool.doctor import environment
from enginepool.ray import requirements


def unpackb(packed: bytes, raw: bool = True) -> Any:
    """Like that of 0.5.6, which has no `strict_map_key`."""


def test_msgpack_in_order() -> None:
    requirements.check()
    assert environment.modules() == []


@pytest.mark.parametrize(
    ("pip", "command"),
    [
        (True, f"{sys.executable} -m pip install --force-reinstall --no-deps 'msgpack>=1'"),
        (False, f"uv pip install --python {sys.executable} --reinstall --no-deps 'msgpack>=1'"),
    ],
)
def test_msgpack_written_over(monkeypatch: pytest.MonkeyPatch, pip: bool, command: str) -> None:
    """Before a pool on many hosts starts anything. The errors name the command that repairs it."""
    old = SimpleNamespace(version=(0, 5, 6), packb=lambda value: b"", unpackb=unpackb)
    monkeypatch.setitem(sys.modules, "msgpack", old)
    if not pip:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidConfig, match=r"msgpack is 0\.5\.6") as caught:
        requirements.check()
    assert str(caught.value).endswith(f"run: {command}")
    (found,) = environment.modules()
    assert found["remedy"] == command
    assert "0.5.6" in found["problem"]


def test_no_msgpack(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool on one host works without it."""
    monkeypatch.setitem(sys.modules, "msgpack", None)
    requirements.check()
    assert environment.modules() == []
