"""The actor of one host: an unchanged `EnginePool`, and its answers to the driver."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from enginepool import (
    AdapterReport,
    EnginePool,
    EnginePoolError,
    PoolClosed,
    QueueFull,
    StagedAdapter,
    StagedWeights,
    StaleWeights,
    SwapReport,
)
from enginepool.ray.wire import Attempt, ErrorReply, News, Prepared, unpack_tree

# How long `poll` waits for an event.
_PATIENCE = 1.0


def _answering(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return our own errors as they are, with their data."""

    @functools.wraps(method)
    async def wrapper(self: Host, *args: Any) -> Any:
        try:
            return await method(self, *args)
        except EnginePoolError as error:
            return ErrorReply(error)

    return wrapper


class Host:
    """An asynchronous Ray actor: all of this runs on its event loop, beside the pool's threads.

    Args:
        pool_args: `EnginePool`'s.
    """

    def __init__(self, host_index: int, pool_args: Mapping[str, Any]) -> None:
        self._index = host_index
        self._pool_args = dict(pool_args)
        self._pool: EnginePool | None = None
        self._opening = asyncio.Lock()
        self._slots = 0  # how many outputs it can run at a time
        self._number = 0  # of the update that it has
        self._staged: dict[int, StagedWeights | StagedAdapter] = {}  # by the update's number
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by an attempt's key
        self._news = News()
        self._told = News()  # sent, and not acknowledged by the driver
        self._is_news = asyncio.Event()

    # Opening and closing

    @_answering
    async def start(self) -> dict[str, Any]:
        """Open the pool, or end the outputs of an open one. Returns a description of the host."""
        async with self._opening:
            if self._pool is None:
                pool = EnginePool(**self._pool_args)
                await asyncio.to_thread(pool.open)
                schedulers = [engine.scheduler_info["scheduler"] for engine in pool.engines]
                self._slots = sum(one.max_running_requests for one in schedulers)
                self._pool = pool
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._news, self._told = News(), News()
        return {
            "pid": os.getpid(),
            "node": socket.gethostname(),
            "slots": self._slots,
            "number": self._number,
        }

    async def stop(self) -> None:
        if self._pool is not None:
            await self._pool.aclose()

    # Outputs

    @_answering
    async def check(
        self, prompts: Any, sampling_params: Any, options: Mapping[str, Any]
    ) -> list[Prepared]:
        """The outputs of a call. Nothing starts.

        Raises:
            InvalidRequest: As the call itself would.
        """
        pool = self._open()
        made = await asyncio.to_thread(pool._prepared, prompts, sampling_params, options)
        return [Prepared(*one) for one in made]

    async def submit(self, attempts: Sequence[Attempt], number: int) -> bool:
        """Begin these attempts. False if the host does not have this update of weights yet."""
        if number > self._number:
            return False
        for attempt in attempts:
            self._tasks[attempt.key] = task = asyncio.create_task(self._run(attempt))
            task.add_done_callback(lambda _, key=attempt.key: self._tasks.pop(key, None))
        return True

    async def cancel(self, keys: Sequence[int]) -> None:
        """End these attempts. They are not reported any more."""
        for key in keys:
            if (task := self._tasks.get(key)) is not None:
                task.cancel()

    @_answering
    async def poll(self, seen: int) -> News:
        """The events that the driver has not acknowledged. Waits a while for one.

        Args:
            seen: `News.number` of the last events that arrived. Later events are sent again.

        Raises:
            PoolClosed: Ray has restarted the process, and its pool is not open yet.
        """
        self._open()
        if seen >= self._told.number:
            self._told = News(seen)
        if not self._told and not self._news:
            self._is_news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_news.wait(), _PATIENCE)
        if self._news:
            self._news.number = self._told.number + 1
            self._told.add(self._news)
            self._news = News()
        return self._told

    async def _run(self, attempt: Attempt) -> None:
        """Run an attempt to its end."""
        key = attempt.key
        try:
            while not await self._ran(attempt):
                await asyncio.sleep(_PATIENCE)
        except EnginePoolError as error:
            self._news.failed.append((key, error))
        except Exception as error:  # other outputs continue; the driver gets the error
            why = f"host {self._index}: {type(error).__name__}: {error}"
            self._news.failed.append((key, EnginePoolError(why)))
        self._is_news.set()

    async def _ran(self, attempt: Attempt) -> bool:
        """Run an attempt. False if the pool already compiles as many grammars as it can. `_run`
        then tries again."""
        key = attempt.key
        try:
            stream = self._open().async_stream(
                sampling_params=attempt.sampling_params,
                input_ids=[attempt.input_ids],
                **attempt.options,
            )
            async for chunk in stream:
                news = self._news
                del chunk["index"]
                chunk["meta_info"]["host_index"] = self._index
                if chunk["meta_info"]["finish_reason"] is None:
                    news.progress[key] = chunk
                else:
                    news.progress.pop(key, None)
                    news.finished.append((key, chunk))
                self._is_news.set()
        except QueueFull:
            return False
        return True

    # Weights

    @_answering
    async def stage(
        self,
        number: int,
        weight_version: int | str,
        options: Mapping[str, Any],
        lora_name: str | None,
        source: Any,
    ) -> None:
        """Stage new weights, or an adapter, beside what serves."""
        pool, options = self._open(), {**options, "weight_version": weight_version}
        source = source if isinstance(source, str) else unpack_tree(source)
        staged: StagedWeights | StagedAdapter
        if lora_name is None:
            staged = await pool.async_stage_weights(source, **options)
        else:
            staged = await pool.async_stage_lora_adapter(lora_name, source, **options)
        self._staged = {number: staged}

    @_answering
    async def commit(self, number: int, mode: Any) -> SwapReport | AdapterReport:
        """Put what is staged in place."""
        staged = self._staged.get(number)
        if staged is None:
            raise StaleWeights(f"host {self._index} has not staged update {number}")
        report = await staged.async_commit(mode)
        self._number = number
        self._staged.clear()
        return report

    async def discard(self, number: int) -> None:
        staged = self._staged.pop(number, None)
        if staged is not None:
            await staged.async_discard()

    @_answering
    async def update(self, number: int, *args: Any) -> None:
        """Catch up with an update that the other hosts have. Nothing runs here meanwhile.

        Args:
            args: As `stage` takes them.
        """
        if number > self._number:
            if reply := await self.stage(number, *args):
                raise reply.error
            if isinstance(reply := await self.commit(number, "retract"), ErrorReply):
                raise reply.error

    @_answering
    async def caught_up(self, number: int, adapters: Sequence[str]) -> None:
        """Record that this host has every update up to this one.

        Args:
            adapters: The adapters that stay loaded. All others are unloaded.
        """
        pool, self._number = self._open(), number
        for name in pool.stats().get("lora_adapters", ()):  # absent without enable_lora
            if name not in adapters:
                await pool.async_unload_lora_adapter(name)

    @_answering
    async def unload(self, name: str) -> None:
        await self._open().async_unload_lora_adapter(name)

    # Steering

    @_answering
    async def pause(self, mode: Any) -> None:
        await self._open().async_pause_generation(mode)

    @_answering
    async def go_on(self) -> None:
        await self._open().async_continue_generation()

    @_answering
    async def checksum(self) -> str:
        return await self._open().async_checksum()

    @_answering
    async def stats(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._open().stats)

    async def ping(self) -> None:
        """Does nothing. The answer shows that the host lives."""

    def _open(self) -> EnginePool:
        if self._pool is None:
            raise PoolClosed(f"the pool of host {self._index} was not opened")
        return self._pool
