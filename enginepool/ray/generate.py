"""The calls that generate, over all hosts, each with its async twin."""

from __future__ import annotations

import queue
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import anyio.to_thread

from enginepool import InvalidRequest
from enginepool.ray.call import Output, RayCall
from enginepool.ray.fleet import FleetCalls

_OPTIONS = (
    *("input_ids", "return_logprob", "top_logprobs_num", "return_prompt_logprob"),
    *("logprob_start_len", "timeout", "prompt_indices", "return_sampling_mask"),
    *("return_routed_experts", "lora_path"),
)


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
        """As `EnginePool.generate_all`, over all hosts; `meta_info["host_index"]` says where."""
        call = self._submit(prompts, sampling_params, options)
        try:
            self._wait(call, options.get("timeout"))
        except BaseException:
            self._leave(call)
            raise
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
        call = await anyio.to_thread.run_sync(self._submit, prompts, sampling_params, options)
        try:
            await anyio.to_thread.run_sync(
                self._wait, call, options.get("timeout"), abandon_on_cancel=True
            )
        except BaseException:
            self._leave(call)
            raise
        return call.results(raise_on_error)

    def as_completed(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Any = None,
        **options: Any,
    ) -> Iterator[dict[str, Any]]:
        """As `EnginePool.as_completed`."""
        call = self._submit(prompts, sampling_params, options)
        return (output.latest or {} for output in self._heard(call, options) if output.done)

    async def async_as_completed(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Any = None,
        **options: Any,
    ) -> AsyncIterator[dict[str, Any]]:
        """`as_completed` on an event loop."""
        call = await anyio.to_thread.run_sync(self._submit, prompts, sampling_params, options)
        async for output in self._async_heard(call, options):
            if output.done:
                yield output.latest or {}

    def stream(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Any = None,
        **options: Any,
    ) -> Iterator[dict[str, Any]]:
        """As `EnginePool.stream`: each output so far, and its `index`."""
        call = self._submit(prompts, sampling_params, options, every=True)
        return (
            {**(output.latest or {}), "index": output.position}
            for output in self._heard(call, options)
        )

    async def async_stream(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Any = None,
        **options: Any,
    ) -> AsyncIterator[dict[str, Any]]:
        """`stream` on an event loop."""
        call = await anyio.to_thread.run_sync(
            lambda: self._submit(prompts, sampling_params, options, every=True)
        )
        async for output in self._async_heard(call, options):
            yield {**(output.latest or {}), "index": output.position}

    def _submit(
        self, prompts: Any, sampling_params: Any, options: dict[str, Any], *, every: bool = False
    ) -> RayCall:
        for name in options:
            if name not in _OPTIONS:
                raise InvalidRequest(f"{name} is unknown; it takes {', '.join(_OPTIONS)}")
        fleet = self.fleet
        checked = fleet.run(fleet.check(prompts, sampling_params, options))
        indices = options.get("prompt_indices")
        if indices is not None and len(indices) != len(checked):
            raise InvalidRequest(f"prompt_indices: {len(indices)} for {len(checked)} prompts")
        call = RayCall(every=every, weight_version=fleet.weight_version)
        kept = {
            name: value
            for name, value in options.items()
            if name not in ("input_ids", "timeout", "prompt_indices") and value is not None
        }
        call.fill(checked, sampling_params, kept, indices)
        fleet.post(fleet.submit, call)
        return call

    def _wait(self, call: RayCall, timeout: float | None) -> None:
        if not call.done.wait(timeout):
            why = f"not finished within timeout={timeout} seconds"
            self._leave(call, "timeout", why)
            call.done.wait()

    def _heard(self, call: RayCall, options: Mapping[str, Any]) -> Iterator[Output]:
        timeout = options.get("timeout")
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if deadline is not None and not left:
                    self._wait(call, 0.0)
                    deadline = left = None
                try:
                    output = call.news.get(timeout=left)
                except queue.Empty:
                    continue
                if output is None:
                    break
                yield output
        finally:
            if not call.done.is_set():
                self._leave(call)
        if call.failure is not None:
            call.results()

    def _leave(
        self, call: RayCall, err_type: str = "cancelled", why: str = "the caller left"
    ) -> None:
        if (fleet := self._fleet) is not None:
            fleet.post(fleet.router.leave, call, err_type, why)

    async def _async_heard(
        self, call: RayCall, options: Mapping[str, Any]
    ) -> AsyncIterator[Output]:
        outputs = self._heard(call, options)
        try:
            while True:
                output = await anyio.to_thread.run_sync(next, outputs, None, abandon_on_cancel=True)
                if output is None:
                    return
                yield output
        finally:
            self._leave(call)
