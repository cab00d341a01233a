"""What the administrators' routes do: one thing at a time, on all engines, and how it went."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyio.to_thread import run_sync

from enginepool.errors import InvalidRequest
from enginepool.serve.error_replies import Refused
from enginepool.serve.reload_config import check_config
from enginepool.swap.report import SwapReport

if TYPE_CHECKING:
    from enginepool.engine.states import PauseMode
    from enginepool.pool.pool import EnginePool
    from enginepool.swap.quiesce import SwapMode


class AdminOperations:
    """Changes of weights and the like.

    Args:
        on_update: Called with each report of new weights.
        server_args: Upstream's, of the engines.

    Attributes:
        model_path: Where the weights that are served were read from.
        reloading: Whether new weights are on their way now.
        last_ok: How the latest reload went; None before the first.
        last_error: Why it failed.
    """

    def __init__(
        self,
        pool: EnginePool,
        model_root: Path | None,
        on_update: Callable[[SwapReport], None],
        server_args: Any,
    ) -> None:
        self._pool, self._on_update = pool, on_update
        self._root = None if model_root is None else model_root.resolve()
        self._server_args = server_args
        self._lock = asyncio.Lock()
        self.model_path = pool.config.model
        self.reloading = False
        self.last_ok: bool | None = None
        self.last_error: str | None = None

    @property
    def busy(self) -> bool:
        return self._lock.locked()

    async def reload(
        self, model_path: str, mode: SwapMode = "drain", weight_version: int | str | None = None
    ) -> SwapReport:
        """Load a checkpoint on every engine, or leave every engine as it was."""
        async with self._lock:
            self.reloading = True
            try:
                path = self._allowed(model_path)
                if path != self._pool.config.model:
                    await run_sync(check_config, path, self._server_args)
                report = await self._pool.async_update_weights(
                    path, mode=mode, weight_version=weight_version
                )
            except Exception as error:
                self.last_ok, self.last_error = False, str(error)
                raise
            finally:
                self.reloading = False
            self.last_ok, self.last_error, self.model_path = True, None, path
        self._on_update(report)
        return report

    async def checksum(self) -> float:
        async with self._lock:
            return await self._pool.async_quick_checksum()

    async def perturb(self, seed: int, scale: float, num_leaves: int) -> dict[str, Any]:
        """Add noise to the first leaves; the checksum before and after."""
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

    async def pause(self, mode: PauseMode) -> None:
        await self._alone(lambda: self._pool.async_pause_generation(mode))

    async def resume(self) -> None:
        await self._alone(self._pool.async_continue_generation)

    async def flush_cache(self) -> None:
        await self._alone(self._pool.async_flush_cache)

    async def _alone(self, work: Callable[[], Awaitable[None]]) -> None:
        async with self._lock:
            await work()

    def _allowed(self, model_path: str) -> str:
        """The path to read, links followed, if a reload may read it."""
        own = self._pool.config.model
        if model_path == own:
            return own
        if self._root is None:
            raise Refused(
                403,
                f"model_path={model_path!r}: without --model-root only the model that the server "
                f"started with can be loaded, {own!r}",
            )
        try:
            path = Path(self._root, model_path).resolve()
            found = path.is_dir()
        except (OSError, ValueError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or error
            raise InvalidRequest(f"model_path={model_path!r}: {why}") from None
        if not path.is_relative_to(self._root):
            raise Refused(403, f"model_path={model_path!r} is outside of --model-root {self._root}")
        if not found:
            raise InvalidRequest(f"model_path={model_path!r}: no such directory")
        return str(path)
