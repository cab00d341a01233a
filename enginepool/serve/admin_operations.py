"""The operations of the administrators' routes. They run one at a time, on all engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginepool.errors import InvalidRequest
from enginepool.runtime.swap_report import SwapReport
from enginepool.serve.allowed_folders import folder_below
from enginepool.serve.error_replies import Refused

if TYPE_CHECKING:
    from enginepool.dispatch.condition import DesiredState, PauseMode
    from enginepool.pool.pool import EnginePool
    from enginepool.pool.steering import PoolPauseMode
    from enginepool.runtime.quiesce import SwapMode


class AdminOperations:
    """Changes weights, pauses, and releases memory. Remembers the result of the latest reload.

    Args:
        on_update: Called with each report of new weights.
        desired: The pool's weights and pauses.

    Attributes:
        model_path: The source of the weights that are served.
        reloading: Whether new weights are being loaded.
        last_ok: Whether the latest reload succeeded; None before the first.
        last_error: The reason if it failed.
    """

    def __init__(
        self,
        pool: EnginePool,
        model_root: Path | None,
        on_update: Callable[[SwapReport], None],
        desired: DesiredState,
    ) -> None:
        self._pool, self._on_update, self._desired = pool, on_update, desired
        self._root = None if model_root is None else model_root.resolve()
        self._lock = asyncio.Lock()
        self._loaded_update = desired.update  # of `model_path`
        self.model_path = pool.config.model
        self.reloading = False
        self.last_ok: bool | None = None
        self.last_error: str | None = None

    @property
    def busy(self) -> bool:
        return self._lock.locked()

    async def reload(
        self,
        model_path: str,
        mode: SwapMode | None = None,
        weight_version: int | str | None = None,
    ) -> SwapReport:
        """Load a checkpoint on every engine, or leave every engine as it was.

        Args:
            mode: Without it, running requests finish first. Paused requests stay on their engines
                and go on with the new weights.
        """
        async with self._lock:
            report = await self._reload(model_path, mode, weight_version)
        self._on_update(report)
        return report

    async def _reload(
        self, model_path: str, mode: SwapMode | None, weight_version: int | str | None
    ) -> SwapReport:
        self.reloading = True
        try:
            path = self._allowed(model_path)
            if mode is None:
                mode = "in_place" if self._desired.pause_reasons else "drain"
            report = await self._pool.async_update_weights(
                path, mode=mode, weight_version=weight_version
            )
        except Exception as error:
            self.last_ok, self.last_error = False, str(error)
            raise
        finally:
            self.reloading = False
        self.last_ok, self.last_error, self.model_path = True, None, path
        self._loaded_update = self._desired.update
        return report

    async def checksum(self) -> float:
        async with self._lock:
            return await self._pool.async_quick_checksum()

    async def perturb(self, seed: int, scale: float, num_leaves: int) -> dict[str, Any]:
        """Add noise to the first leaves; returns the checksum before and after."""
        started = time.perf_counter()
        async with self._lock:
            before = await self._pool.async_quick_checksum()
            report = await self._pool.async_perturb_weights(seed, scale, num_leaves)
            after = await self._pool.async_quick_checksum()
        self._on_update(report)
        return {
            "elapsed_sec": time.perf_counter() - started,
            "num_leaves": num_leaves,
            "checksum_before": before,
            "checksum_after": after,
            "checksum_delta": after - before,
        }

    async def pause_as_vllm(self, mode: str, *, clear_cache: bool) -> None:
        """`abort` ends running requests, `wait` lets them finish. `keep` lets them go on later;
        with `clear_cache` their KV is then computed again."""
        modes: dict[str, PoolPauseMode] = {
            "abort": "abort", "wait": "drain", "keep": "retract" if clear_cache else "in_place",
        }  # fmt: skip
        async with self._lock:
            await self._pool.async_pause_generation(modes[mode])
            if clear_cache:
                await self._pool.async_flush_cache()

    async def sleep(self, mode: str, *, weights: bool) -> None:
        """Release the KV cache's memory and, if asked for, the weights'."""
        async with self._lock:
            paused = "paused" in self._desired.pause_reasons
            if mode != "keep":
                await self._pool.async_pause_generation("abort" if mode == "abort" else "drain")
            try:
                await self._pool.async_release_memory_occupation()
                if weights:
                    await self._pool.async_release_weights()
            finally:
                if mode != "keep" and not paused:
                    await self._pool.async_continue_generation()

    async def release_memory(self, tags: Sequence[str] | None) -> None:
        """Release the memory of these tags; without tags, all of it."""
        async with self._lock:
            if _selected("kv_cache", tags):
                await self._pool.async_release_memory_occupation()
            if _selected("weights", tags):
                await self._pool.async_release_weights()

    async def resume_memory(self, tags: Sequence[str] | None) -> None:
        """Take back the memory of these tags. The weights are read again from their checkpoint, and
        keep their version.

        Raises:
            InvalidRequest: The weights did not come from a checkpoint.
        """
        async with self._lock:
            if _selected("weights", tags) and self._desired.no_weights is not None:
                version = self._desired.weight_version
                if self._desired.update != self._loaded_update:
                    raise InvalidRequest(
                        f"the weights of version {version!r} did not come from a checkpoint and "
                        "are lost; load other weights with /update_weights_from_disk"
                    )
                report = await self._reload(self.model_path, "in_place", version)
                self._on_update(report)
            if _selected("kv_cache", tags):
                await self._pool.async_resume_memory_occupation()

    async def pause(self, mode: PauseMode) -> None:
        async with self._lock:
            await self._pool.async_pause_generation(mode)

    async def resume(self) -> None:
        async with self._lock:
            await self._pool.async_continue_generation()

    async def flush_cache(self) -> None:
        async with self._lock:
            await self._pool.async_flush_cache()

    def _allowed(self, model_path: str) -> str:
        """The resolved path, if a reload may read it."""
        own = self._pool.config.model
        if model_path in (own, self.model_path):
            return model_path
        if self._root is None:
            raise Refused(
                403,
                f"model_path={model_path!r}: without --model-root only the model that the server "
                f"started with can be loaded, {own!r}",
            )
        found = folder_below({"--model-root": self._root}, "model_path", model_path)
        if found is None:
            raise InvalidRequest(f"model_path={model_path!r}: no such directory")
        return found


def _selected(tag: str, tags: Sequence[str] | None) -> bool:
    return not tags or tag in tags
