"""The models that requests can name: the base, its adapters, and those that a folder has."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginepool.errors import InvalidRequest
from enginepool.logs import logger
from enginepool.serve.allowed_folders import adapter_folder, folder_below
from enginepool.serve.error_replies import Refused
from enginepool.serve.options import ServeOptions
from enginepool.values import shown

if TYPE_CHECKING:
    from enginepool.lora.adapter import Adapter
    from enginepool.pool.pool import EnginePool
    from enginepool.runtime.adapters import AdapterReport
    from enginepool.runtime.quiesce import SwapMode
    from enginepool.runtime.runtime import Runtime


class ServedModels:
    """Used on the server's event loop only. Adapters are loaded one after the other.

    An adapter that a request names and that is not loaded is read from the resolver's folder. If
    there is no room for it, an adapter of that folder that no request uses is dropped: the least
    recently used one.

    Attributes:
        base: The name of the model without adapters.
    """

    def __init__(
        self, pool: EnginePool, runtime: Runtime, base: str, options: ServeOptions
    ) -> None:
        self._pool, self._runtime, self._adapters = pool, runtime, runtime.adapters
        self.base = base
        self._bases = {"", base, pool.config.model}
        given = {
            "--model-root": options.model_root,
            "--lora-resolver-dir": options.lora_resolver_dir,
        }
        self._roots = {option: root.resolve() for option, root in given.items() if root is not None}
        self._resolver = self._roots.get("--lora-resolver-dir")
        self._lock = asyncio.Lock()
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._wanted = Counter[str]()  # names that requests without a Call need
        self._used = OrderedDict[str, None]()  # the least recently used name first

    @property
    def busy(self) -> bool:
        return self._lock.locked()

    def adapters(self) -> list[Adapter]:
        return self._adapters.loaded()

    def adapter_of(self, model: str) -> str | None:
        """The adapter that a request's `model` names; None for the base.

        A pool without adapters takes any name, as upstream does.

        Raises:
            Refused: There is no such model.
        """
        if not self._adapters.enabled or model in self._bases:
            return None
        if self._adapters.get(model) is None and self._folder(model) is None:
            served = ", ".join([self.base, *self._adapters.names()])
            raise Refused(
                404, f"the model {shown(model)} does not exist; served: {served}",
                code="model_not_found", param="model",
            )  # fmt: skip
        return model

    @asynccontextmanager
    async def loaded(self, names: Any) -> AsyncIterator[None]:
        """Inside the block, the adapters of these names are loaded, if the resolver's folder has
        them.

        Args:
            names: `lora_path` of a request.

        Raises:
            InvalidWeights: The folder of one has no adapter that fits.
            Refused: There is no room for it.
        """
        given = names if isinstance(names, list) else [names]
        wanted = {name for name in given if isinstance(name, str)} if self._resolver else set[str]()
        self._wanted.update(wanted)
        try:
            for name in wanted:
                await self._provide(name)
            yield
        finally:
            self._wanted.subtract(wanted)
            self._wanted = +self._wanted

    async def load(
        self,
        name: str,
        lora_path: str,
        mode: SwapMode = "drain",
        weight_version: int | str | None = None,
        *,
        replace: bool = True,
    ) -> AdapterReport:
        """Load an adapter for an administrator, on every engine or on none.

        Args:
            replace: Whether it may replace an adapter of the same name.
        """
        self._adapters.check_enabled(name, "lora_name")
        if name in self._bases:
            raise InvalidRequest(f"lora_name={shown(name)} is the name of the model itself")
        if not self._roots:
            raise Refused(
                403,
                f"lora_path={lora_path!r}: adapters are only read below --model-root or "
                "--lora-resolver-dir; start the server with one of them",
            )
        if (folder := folder_below(self._roots, "lora_path", lora_path)) is None:
            raise Refused(404, f"lora_path={lora_path!r}: no such directory", param="lora_path")
        async with self._lock:
            if not replace and self._adapters.get(name) is not None:
                raise Refused(
                    400, f"the lora adapter {shown(name)} has already been loaded; to replace it, "
                    "send load_inplace=true", param="lora_name",
                )  # fmt: skip
            return await self._load(name, folder, mode, weight_version)

    async def unload(self, name: str) -> None:
        async with self._lock:
            await self._pool.async_unload_lora_adapter(name)

    def _folder(self, name: str) -> Path | None:
        return None if self._resolver is None else adapter_folder(self._resolver, name)

    async def _provide(self, name: str) -> None:
        if self._adapters.get(name) is None:
            if (folder := self._folder(name)) is None:
                return  # the call's own error says what is loaded
            if (task := self._loading.get(name)) is None:
                task = self._loading[name] = asyncio.create_task(self._resolve(name, str(folder)))
                task.add_done_callback(lambda task: self._resolved(name, task))
            # A client that leaves does not stop it: others may wait for the same adapter.
            await asyncio.shield(task)
        self._used[name] = None
        self._used.move_to_end(name)

    async def _resolve(self, name: str, folder: str) -> None:
        async with self._lock:
            if self._adapters.get(name) is None:
                await self._load(name, folder)

    def _resolved(self, name: str, task: asyncio.Task[None]) -> None:
        del self._loading[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger().warning("enginepool.adapter_not_loaded", lora_name=name, why=str(error))

    async def _load(
        self,
        name: str,
        folder: str,
        mode: SwapMode = "drain",
        weight_version: int | str | None = None,
    ) -> AdapterReport:
        if self._resolver is not None:
            self._make_room(name)
        report = await self._pool.async_load_lora_adapter(
            name, folder, mode=mode, weight_version=weight_version
        )
        seconds = report.seconds["total"]
        logger().info("enginepool.adapter_loaded", lora_name=name, path=folder, seconds=seconds)
        return report

    def _make_room(self, name: str) -> None:
        """Drop an adapter if there is no room for another one.

        Raises:
            Refused: All that are loaded are in use, or did not come from the resolver's folder.
        """
        loaded = {adapter.name: adapter for adapter in self.adapters()}
        most = self._adapters.most
        if name in loaded or most is None or len(loaded) < most:
            return
        running = [request.adapter for request in self._runtime.dispatch.unfinished()]
        in_use = {adapter.name for adapter in running if adapter is not None} | self._wanted.keys()
        used = [each for each in self._used if each in loaded]
        self._used = OrderedDict.fromkeys(used)
        for each in [*(name for name in loaded if name not in self._used), *used]:
            if each not in in_use and self._is_from_resolver(loaded[each]):
                # At once and on this thread: the next request finds it missing, and loads it.
                self._adapters.remove(each)
                return
        raise Refused(
            503, f"{shown(name)}: {len(loaded)} adapters are loaded (--max-loaded-loras {most}), "
            "and none can be dropped: each is in use or is not of --lora-resolver-dir; try again, "
            "or unload one",
            code="adapters_full", retry_after=1,
        )  # fmt: skip

    def _is_from_resolver(self, adapter: Adapter) -> bool:
        """Whether the adapter was read from the resolver's folder. The folder may be gone, because
        trainers delete old checkpoints. An adapter with a version that an administrator gave does
        not count: loaded again, it would have another version."""
        assert self._resolver is not None
        folder = self._folder(adapter.name) or self._resolver / adapter.name
        return adapter.source == str(folder) and adapter.version == adapter.number
