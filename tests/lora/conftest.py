"""A pool of two engines with two slots each, and its model merged with its adapters."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from enginepool import EnginePool
from tests.support.adapters import Arrays, config, merged, random_adapter, write_adapter
from tests.support.pools import SMALL
from tests.support.reference import Greedy, reference_greedy_batch

LORA: dict[str, Any] = {
    "enable_lora": True,
    "max_lora_rank": 4,
    "max_loras_per_batch": 2,
    "max_loaded_loras": 8,
    "lora_target_modules": ["all"],
}
RANKS = {"a": 4, "b": 3, "c": 1, "d": 2}
TOKENS = 12


class World(NamedTuple):
    """A model, random adapters, and the weights that they make."""

    model: Path
    arrays: dict[str, Arrays]
    folders: dict[str, Path]
    merged: dict[str | None, Path]

    def expected(self, name: str | None, prompts: list[list[int]], n: int = TOKENS) -> list[Greedy]:
        return reference_greedy_batch(self.merged[name], prompts, n)


def make_world(model: Path, folder: Path) -> World:
    arrays = {
        name: random_adapter(model, seed, rank=rank)
        for seed, (name, rank) in enumerate(RANKS.items())
    }
    folders = {
        name: write_adapter(folder / name, arrays[name], config(rank))
        for name, rank in RANKS.items()
    }
    made: dict[str | None, Path] = {
        name: merged(folder / f"merged-{name}", model, arrays[name], 8 / rank)
        for name, rank in RANKS.items()
    }
    return World(model, arrays, folders, {None: model, **made})


@pytest.fixture(scope="session")
def world(model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(model_dir("qwen3"), tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="package")
def opened(world: World) -> Iterator[EnginePool]:
    with EnginePool(str(world.model), devices=2, **LORA, **SMALL) as pool:
        yield pool


@pytest.fixture
def adapted(opened: EnginePool) -> Iterator[EnginePool]:
    """The pool, without adapters before and after a test."""
    yield opened
    for name in opened.runtime.adapters.names():
        opened.unload_lora_adapter(name)
