"""The calls that generate, over all hosts, each with its async twin."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import anyio
import anyio.to_thread

from enginepool import InvalidRequest, PoolClosed
from enginepool.ray.call import Output, RayCall
from enginepool.ray.fleet import OF_ALL, FleetCalls

_OPTIONS = (
    *("input_ids", "add_special_tokens", *OF_ALL, "logprob_start_len"),
    *("prompt_indices", "lora_path", "timeout"),
)

# An output, and its result so far.
OutputNews = tuple[Output, dict[str, Any]]


class RayGenerateCalls(FleetCalls):
    """Mixin of `RayEnginePool`: calls whose outputs are spread over the hosts."""

    def generate_all(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Any = None,
        *,
        raise_on_error: bool = False,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """As `EnginePool.generate_all`, over all hosts; `meta_info["host_index"]` says where.

        Raises:
            PoolFailed: No host is left, or none serves within `timeout`.
        """
        began = time.monotonic()
        call, timeout = self._make_call(prompts, sampling_params, options)
        with self._submitted(call):
            self._wait(call, timeout, began)
        return call.results(raise_on_error)

    async def async_generate_all(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Any = None,
        *,
        raise_on_error: bool = False,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """`generate_all` on an event loop. Cancelling ends the outputs on the hosts."""
        began = time.monotonic()
        call, timeout = await self._async_make_call(prompts, sampling_params, options)
        with self._submitted(call):
            await _in_thread(self._wait, call, timeout, began)
        return call.results(raise_on_error)

    def as_completed(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Any = None,
        **options: Any,
    ) -> Iterator[dict[str, Any]]:
        """As `EnginePool.as_completed`."""
        return self._as_completed(*self._make_call(prompts, sampling_params, options))

    def _as_completed(self, call: RayCall, timeout: float | None) -> Iterator[dict[str, Any]]:
        with self._submitted(call):
            for output, latest in self._news(call, timeout):
                if output.done:
                    yield latest

    async def async_as_completed(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Any = None,
        **options: Any,
    ) -> AsyncIterator[dict[str, Any]]:
        """`as_completed` on an event loop."""
        began = time.monotonic()
        call, timeout = await self._async_make_call(prompts, sampling_params, options)
        with self._submitted(call):
            async for output, latest in self._async_news(call, timeout, began):
                if output.done:
                    yield latest

    def stream(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Any = None,
        **options: Any,
    ) -> Iterator[dict[str, Any]]:
        """As `EnginePool.stream`: each output so far, and its `index`."""
        return self._stream(*self._make_call(prompts, sampling_params, options, every=True))

    def _stream(self, call: RayCall, timeout: float | None) -> Iterator[dict[str, Any]]:
        with self._submitted(call):
            for output, latest in self._news(call, timeout):
                yield {**latest, "index": output.position}

    async def async_stream(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Any = None,
        **options: Any,
    ) -> AsyncIterator[dict[str, Any]]:
        """`stream` on an event loop."""
        began = time.monotonic()
        call, timeout = await self._async_make_call(prompts, sampling_params, options, every=True)
        with self._submitted(call):
            async for output, latest in self._async_news(call, timeout, began):
                yield {**latest, "index": output.position}

    def _make_call(
        self, prompts: Any, sampling_params: Any, options: dict[str, Any], *, every: bool = False
    ) -> tuple[RayCall, float | None]:
        """Check the arguments. Nothing starts yet. Returns the call and its timeout."""
        for name in options:
            if name not in _OPTIONS:
                raise InvalidRequest(f"{name} is unknown; it takes {', '.join(_OPTIONS)}")
        options = {name: _plain(value) for name, value in options.items()}
        sampling_params = _plain(sampling_params)
        several = isinstance(sampling_params, list | tuple)
        for one in sampling_params if several else [sampling_params]:
            if not isinstance(one, Mapping | None):
                raise InvalidRequest(
                    f"sampling_params: expected a dict, or one per prompt, got {type(one).__name__}"
                )
        fleet = self.fleet
        call = fleet.run(fleet.make_call(prompts, sampling_params, options, every=every))
        timeout = options.get("timeout")
        return call, None if timeout is None else float(timeout)

    async def _async_make_call(
        self, prompts: Any, sampling_params: Any, options: dict[str, Any], *, every: bool = False
    ) -> tuple[RayCall, float | None]:
        return await _in_thread(
            lambda: self._make_call(prompts, sampling_params, options, every=every)
        )

    @contextlib.contextmanager
    def _submitted(self, call: RayCall) -> Iterator[None]:
        """Submit a call, and run the block that waits for it. If the caller leaves the block early,
        the call's outputs end on the hosts."""
        fleet = self.fleet
        try:
            fleet.post(fleet.submit, call)
            yield
        except BaseException:
            self._leave(call)
            raise

    def _wait(self, call: RayCall, timeout: float | None, began: float) -> None:
        left = None if timeout is None else max(0.0, began + timeout - time.monotonic())
        if not call.done.wait(left):
            self._time_out(call, timeout)
            call.done.wait()

    def _time_out(self, call: RayCall, timeout: float | None) -> None:
        self._leave(call, "timeout", f"not finished within timeout={timeout} seconds")

    def _leave(
        self, call: RayCall, err_type: str = "cancelled", why: str = "the caller left"
    ) -> None:
        if (fleet := self._fleet) is not None:
            with contextlib.suppress(PoolClosed):  # then its outputs have ended
                fleet.post(fleet.router.leave, call, err_type, why)

    def _news(
        self, call: RayCall, timeout: float | None, began: float | None = None
    ) -> Iterator[OutputNews]:
        """Each output of a submitted call, with its result so far, when it has ended and, in a
        stream, when it has grown. A slow reader gets the newest result once.

        Args:
            began: The start of the timeout, on the monotonic clock. None: now.

        Raises:
            PoolFailed, PoolClosed, InvalidRequest: The call has failed.
        """
        began = time.monotonic() if began is None else began
        deadline = None if timeout is None else began + timeout
        seen: dict[int, dict[str, Any]] = {}
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if deadline is not None and not left:
                self._time_out(call, timeout)
                deadline = left = None
            try:
                output = call.news.get(timeout=left)
            except queue.Empty:
                continue
            if output is None:
                break
            latest = output.latest or {}  # read once: the fleet's thread replaces it
            if seen.get(output.position) is not latest:
                seen[output.position] = latest
                yield output, latest
        call.results()

    async def _async_news(
        self, call: RayCall, timeout: float | None, began: float
    ) -> AsyncIterator[OutputNews]:
        news = self._news(call, timeout, began)
        while True:
            one = await _in_thread(lambda: next(news, None))
            if one is None:
                return
            yield one


async def _in_thread[T](work: Callable[..., T], *args: Any) -> T:
    """Run `work` in a thread that does not count toward anyio's thread limit.

    Callers that wait for outputs could hold all threads of that limit. The call that lets the
    outputs go on, such as `continue_generation`, would then get none. A cancelled task abandons the
    thread, so `work` must submit no outputs.
    """
    return await anyio.to_thread.run_sync(
        work, *args, limiter=anyio.CapacityLimiter(1), abandon_on_cancel=True
    )


def _plain(value: Any) -> Any:
    """NumPy's and JAX's values as plain Python. The driver uses some, and Ray sends all."""
    return value.tolist() if hasattr(value, "tolist") else value
