"""Fixtures that the tests of steady decode share."""

from collections.abc import Iterator
from typing import Any

import pytest

from enginepool import EnginePool
from tests.support.liveness import at_rest, until
from tests.support.marks import slow
from tests.support.pools import NATIVE_PAGES, MakePool
from tests.support.steady import OPTIONS, joins, several_at_once


@pytest.fixture(
    scope="module",
    params=[
        {"max_decode_steps": 8},
        *slow({"max_decode_steps": 1}, {"page_size": 8}, {"tp_size": 2}),
        *slow({"page_size": 8, "max_decode_steps": 5}, {"tp_size": 2, "max_decode_steps": 8}),
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()),
)
def kind(request: pytest.FixtureRequest, make_pool: MakePool) -> Iterator[EnginePool]:
    """Two engines that decode by steady decode."""
    if "page_size" in request.param and not NATIVE_PAGES:
        pytest.skip("this upstream's native attention knows no pages")
    model = "larger qwen3" if "tp_size" in request.param else "qwen3"
    with several_at_once():
        yield make_pool(model, 2, **OPTIONS | request.param)


@pytest.fixture(params=[8, *slow(1)], ids=["eight at once", "one at a time"])
def options(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Options of a pool that launches this many decode steps at once."""
    with several_at_once():
        yield OPTIONS | {"max_decode_steps": request.param}


@pytest.fixture
def steady_pool(make_pool: MakePool, options: dict[str, Any]) -> Iterator[EnginePool]:
    """Two such engines with empty caches. They must be idle after the test."""
    pool = make_pool("qwen3", 2, **options)
    pool.flush_cache()
    yield pool
    until(lambda: at_rest(pool))


@pytest.fixture
def joined() -> Iterator[list[int]]:
    """How many requests joined the steps in flight, each time."""
    with joins() as counts:
        yield counts
