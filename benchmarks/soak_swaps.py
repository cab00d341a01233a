"""Swaps of weights in every mode, and pauses, while callers ask."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio

from benchmarks.injector import Injector
from enginepool import EnginePool, InvalidRequest, WeightUpdateFailed

# Seconds, at most, from one to the next.
_SWAP_EVERY = 2.0
_PAUSE_EVERY = 5.0
_MODES = ("drain", "retract", "abort", "in_place")
_STAGINGS: tuple[Any, ...] = ("auto", "auto", "stream")
# The share of swaps during which a step of one engine breaks.
_BROKEN_SWAPS = 0.05


class Swaps:
    """Changes weights between two models, and pauses.

    Args:
        injector: Breaks steps during swaps. None: no swap may fail.

    Attributes:
        mode_of: The mode of each swap by version.
        refused: Swaps that a fault ended.
        violations: Errors of swaps that have no cause.
    """

    def __init__(
        self, pool: EnginePool, models: Sequence[Path], seed: int, injector: Injector | None
    ) -> None:
        self._pool, self._models, self._injector = pool, models, injector
        self._random = random.Random(f"swaps {seed}")
        self.mode_of = {0: "drain"}
        self.refused = 0
        self.violations: list[str] = []

    async def swap(self, running: Callable[[], bool]) -> None:
        number, draw = 0, self._random
        while running():
            await anyio.sleep(draw.uniform(0.0, _SWAP_EVERY))
            mode: Any = draw.choice(_MODES)
            self.mode_of[number + 1] = mode
            if self._injector is not None and draw.random() < _BROKEN_SWAPS:
                self._injector.break_a_step("step raises during a swap")
            try:
                await self._pool.async_update_weights(
                    self._models[(number + 1) % len(self._models)],
                    weight_version=number + 1,
                    mode=mode,
                    staging=draw.choice(_STAGINGS),
                )
            except WeightUpdateFailed as error:
                self.refused += 1
                if self._injector is None:
                    self.violations.append(f"an update raised {error!r}")
            except InvalidRequest as error:
                # A drain is refused if a pause keeps a running request from finishing.
                if mode != "drain" or "continue_generation" not in str(error):
                    self.violations.append(f"an update raised {error!r}")
            else:
                number += 1

    async def pause(self, running: Callable[[], bool]) -> None:
        """Pauses of every mode, also during swaps, and flushes of the cache."""
        draw = self._random
        while running():
            await anyio.sleep(draw.uniform(0.0, _PAUSE_EVERY))
            mode: Any = draw.choice(("retract", "in_place", "retract", "in_place", "abort"))
            await self._pool.async_pause_generation(mode)
            await anyio.sleep(draw.uniform(0.0, 0.3))
            await self._pool.async_continue_generation()
            if draw.random() < 0.2:
                await self._pool.async_flush_cache()
