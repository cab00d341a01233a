"""Adapters that are loaded, replaced in every mode and unloaded, while callers name them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio

from benchmarks.micro_pool import ADAPTERS
from enginepool import EnginePool, WeightUpdateFailed

_MODES = ("drain", "retract", "abort", "in_place")
_EVERY = 2.0  # seconds, at most
_UNLOADED = 0.2  # the share of adapters that are unloaded before


class Adapters:
    """Loads and unloads adapters, and names the checkpoint that weights and adapter make.

    Args:
        folders: Of `write_adapters`.

    Attributes:
        mode_of: By adapter and version, the mode of its update. Versions of all adapters rise.
        refused: What updates raised.
    """

    def __init__(
        self, pool: EnginePool, models: Sequence[Path], folders: Sequence[Path], seed: int
    ) -> None:
        self.models = models
        self._pool, self._folders = pool, folders
        self._random = random.Random(f"adapters {seed}")
        self.mode_of: dict[str, dict[int, str]] = {name: {} for name in ADAPTERS}
        self.refused: list[str] = []

    async def change(self, running: Callable[[], bool]) -> None:
        number, draw = 0, self._random
        while running():
            await anyio.sleep(draw.uniform(0.0, _EVERY))
            name, number = draw.choice(ADAPTERS), number + 1
            if name in self._pool.stats()["lora_adapters"] and draw.random() < _UNLOADED:
                await self._pool.async_unload_lora_adapter(name)
            mode: Any = draw.choice(_MODES)
            self.mode_of[name][number] = mode  # an output may have it before the call returns
            try:
                await self._pool.async_load_lora_adapter(
                    name, self._folders[number % 2], weight_version=number, mode=mode
                )
            except WeightUpdateFailed as error:
                del self.mode_of[name][number]
                self.refused.append(repr(error))  # its traceback holds arrays

    def model_of(self, version: int, adapter: int | None) -> Path:
        """The checkpoint that a version of the weights and a version of an adapter make
        together."""
        if adapter is None:
            return self.models[version % 2]
        return self._folders[adapter % 2] / f"merged-{version % 2}"
