"""An event loop in a thread of its own, which takes work from other threads until it closes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from enginepool import PoolClosed


class WorkLoop:
    """Runs coroutines and functions that other threads give it.

    Attributes:
        closed: Whether it takes no more work.
    """

    def __init__(self, name: str) -> None:
        self.closed = False
        # Held while `closed` is read or set and the loop gets work. So the loop gets none that it
        # would not finish. Reentrant, because the garbage collector may close an iterator here,
        # which gives the loop work.
        self._gate = threading.RLock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    # Called from other threads

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end.

        Raises:
            PoolClosed: The loop is closed, or was closed meanwhile.
        """
        try:
            return self._give(coroutine).result()
        except concurrent.futures.CancelledError:
            raise PoolClosed("the pool was closed") from None

    def _give(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        with self._gate:
            if self.closed:
                coroutine.close()  # otherwise Python warns that it was never awaited
                raise PoolClosed("the pool is already closed")
            return asyncio.run_coroutine_threadsafe(self._tracked(coroutine), self._loop)

    async def _tracked(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await self._spawn(coroutine)

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function on the loop, without waiting.

        Raises:
            PoolClosed: The loop is closed.
        """
        with self._gate:
            if self.closed:
                raise PoolClosed("the pool is already closed")
            self._loop.call_soon_threadsafe(function, *args)

    def _close(self, function: Callable[[], Any]) -> None:
        """Take no more work. Call a function after all that was posted, then cancel all tasks."""
        with self._gate:
            self.closed = True
            closing = asyncio.run_coroutine_threadsafe(self._cancel_after(function), self._loop)
        closing.result()

    def end_loop(self) -> None:
        """End the thread of a closed loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # On the loop

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _cancel_after(self, function: Callable[[], Any]) -> None:
        function()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
