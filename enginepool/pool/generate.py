"""The calls that generate. Each has an async twin."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Unpack

from enginepool.dispatch.request import Call
from enginepool.dispatch.wait import async_chunks, chunks, submitted
from enginepool.frontend.call_options import CallOptions, Params, Prompts, check_options
from enginepool.frontend.cancellation import in_thread
from enginepool.frontend.output_processor import (
    empty_meta,
    make_chunk,
    make_result,
    raise_failure,
)
from enginepool.frontend.progress_bar import show_progress
from enginepool.pool.calls import CallGroup, async_run_call, run_call, single
from enginepool.runtime.runtime import Runtime
from enginepool.values import flag


class GenerateCalls(CallGroup):
    """Mixin of `EnginePool`: the calls that generate. Every method is thread-safe.

    All raise InvalidRequest for bad input, before anything has started. They raise PoolClosed if
    the pool is closed before or during the call, and PoolFailed if no engine is left.
    """

    def generate_all(
        self,
        prompts: Prompts = None,
        sampling_params: Params = None,
        *,
        progress: bool = False,
        raise_on_error: bool = False,
        **options: Unpack[CallOptions],
    ) -> list[dict[str, Any]]:
        """Generate for every prompt, on all engines. Results come in input order.

        Args:
            sampling_params: One dict for all prompts, or one per prompt. None: the parameters of
                the checkpoint's generation_config.json.
            progress: Show a progress bar on standard error.
            raise_on_error: Raise if an output ended early. Otherwise it is returned as it is.
            options: See `CallOptions`.

        Returns:
            Upstream's result dicts. With n > 1 a flat list, grouped by prompt.

        Raises:
            RequestsFailed: An output ended early, with `raise_on_error`. `.results` has all
                results.
        """
        checked = check_options("generate_all", options)
        shows, raises = flag("progress", progress), flag("raise_on_error", raise_on_error)
        runtime = self.runtime
        return run(runtime, prompts, sampling_params, checked, raises, shows)[1]

    async def async_generate_all(
        self,
        prompts: Prompts = None,
        sampling_params: Params = None,
        *,
        raise_on_error: bool = False,
        **options: Unpack[CallOptions],
    ) -> list[dict[str, Any]]:
        """`generate_all` on an event loop. Cancelling ends the requests inside the engines."""
        checked = check_options("generate_all", options)
        raises = flag("raise_on_error", raise_on_error)
        runtime = await self._async_runtime()
        return (await async_run(runtime, prompts, sampling_params, checked, raises))[1]

    def generate(
        self,
        prompt: Prompts = None,
        sampling_params: Params = None,
        *,
        raise_on_error: bool = False,
        **options: Unpack[CallOptions],
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Generate for one prompt. Returns a dict, or a list with n > 1 or a list of prompts."""
        checked = check_options("generate", options)
        raises = flag("raise_on_error", raise_on_error)
        return single(*run(self.runtime, prompt, sampling_params, checked, raises))

    async def async_generate(
        self,
        prompt: Prompts = None,
        sampling_params: Params = None,
        *,
        raise_on_error: bool = False,
        **options: Unpack[CallOptions],
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """`generate` on an event loop. Cancelling ends the requests inside the engines."""
        checked = check_options("generate", options)
        raises = flag("raise_on_error", raise_on_error)
        runtime = await self._async_runtime()
        return single(*await async_run(runtime, prompt, sampling_params, checked, raises))

    def as_completed(
        self,
        prompts: Prompts = None,
        sampling_params: Params = None,
        **options: Unpack[CallOptions],
    ) -> Iterator[dict[str, Any]]:
        """Yield each result as soon as it is complete.

        `meta_info["prompt_index"]` has the index of its prompt. Bad input raises at the call. The
        requests start at the first `next`. Closing the iterator ends those that are unfinished.
        """
        checked = check_options("as_completed", options)
        runtime = self.runtime
        call = _make_call(runtime, prompts, sampling_params, checked)
        return self._as_completed(runtime, call, checked.get("timeout"))

    def _as_completed(
        self, runtime: Runtime, call: Call, timeout: float | None
    ) -> Iterator[dict[str, Any]]:
        with submitted(runtime.dispatch, call):
            for chunk in chunks(runtime.dispatch, call, timeout):
                yield make_result(chunk.request, runtime.input_processor.tokenizer)
        raise_failure(call, runtime.input_processor.tokenizer)

    async def async_as_completed(
        self,
        prompts: Prompts = None,
        sampling_params: Params = None,
        **options: Unpack[CallOptions],
    ) -> AsyncIterator[dict[str, Any]]:
        """`as_completed` on an event loop. The first `anext` raises for bad input."""
        checked = check_options("as_completed", options)
        runtime = await self._async_runtime()
        call = await in_thread(_make_call, runtime, prompts, sampling_params, checked)
        dispatch = runtime.dispatch
        with submitted(dispatch, call):
            async for chunk in async_chunks(dispatch, call, checked.get("timeout")):
                yield make_result(chunk.request, runtime.input_processor.tokenizer)
        raise_failure(call, runtime.input_processor.tokenizer)

    def stream(
        self,
        prompt: Prompts = None,
        sampling_params: Params = None,
        **options: Unpack[CallOptions],
    ) -> Iterator[dict[str, Any]]:
        """Yield upstream's chunks: the text and ids so far, and the `index` of the output.

        A slow reader skips chunks; each chunk has all of the output so far. The last chunk of an
        output has its `finish_reason` and equals its result. The requests start at the first
        `next`. Closing the iterator ends those that are unfinished.
        """
        checked = check_options("stream", options)
        runtime = self.runtime
        call = _make_call(runtime, prompt, sampling_params, checked, stream=True)
        return self._stream(runtime, call, checked.get("timeout"))

    def _stream(
        self, runtime: Runtime, call: Call, timeout: float | None
    ) -> Iterator[dict[str, Any]]:
        with submitted(runtime.dispatch, call):
            for chunk in chunks(runtime.dispatch, call, timeout):
                yield make_chunk(chunk, runtime.input_processor.tokenizer)
        raise_failure(call, runtime.input_processor.tokenizer)

    async def async_stream(
        self,
        prompt: Prompts = None,
        sampling_params: Params = None,
        **options: Unpack[CallOptions],
    ) -> AsyncIterator[dict[str, Any]]:
        """`stream` on an event loop. The first `anext` raises for bad input."""
        checked = check_options("stream", options)
        runtime = await self._async_runtime()
        call = await in_thread(
            lambda: _make_call(runtime, prompt, sampling_params, checked, stream=True)
        )
        dispatch = runtime.dispatch
        with submitted(dispatch, call):
            async for chunk in async_chunks(dispatch, call, checked.get("timeout")):
                yield make_chunk(chunk, runtime.input_processor.tokenizer)
        raise_failure(call, runtime.input_processor.tokenizer)

    def _prepared(
        self, prompts: Prompts, sampling_params: Any, options: Mapping[str, Any]
    ) -> list[tuple[list[int], Mapping[str, Any], dict[str, Any]]]:
        """Check a call, and start nothing. For `RayEnginePool`, which starts each output by itself.

        Returns:
            For each output: the ids of its prompt, its sampling parameters, and the `meta_info` of
            a result without tokens.
        """
        runtime = self.runtime
        checked = check_options("as_completed", options)
        call = _make_call(runtime, prompts, sampling_params, checked)
        several = isinstance(sampling_params, list | tuple)
        place, prepared = -1, []
        for request in call.requests:
            place += request.sample_index == 0
            own = sampling_params[place] if several else sampling_params
            params = runtime.input_processor.default_params(request) if own is None else own
            prepared.append((request.input_ids, params, empty_meta(request)))
        return prepared


def _make_call(
    runtime: Runtime,
    prompts: Prompts,
    sampling_params: Params,
    checked: CallOptions,
    *,
    stream: bool = False,
) -> Call:
    return runtime.input_processor.make_call(
        prompts,
        sampling_params,
        checked,
        stream=stream,
        weight_version=runtime.desired.weight_version,
    )


def run(
    runtime: Runtime,
    prompts: Prompts,
    sampling_params: Params,
    checked: CallOptions,
    raise_on_error: bool,
    progress: bool = False,
) -> tuple[Call, list[dict[str, Any]]]:
    """Make a call and run it to its end."""
    call = _make_call(runtime, prompts, sampling_params, checked)
    with show_progress(call, progress) as tick:
        return call, run_call(runtime, call, checked.get("timeout"), raise_on_error, tick)


async def async_run(
    runtime: Runtime,
    prompts: Prompts,
    sampling_params: Params,
    checked: CallOptions,
    raise_on_error: bool,
) -> tuple[Call, list[dict[str, Any]]]:
    """`run` on an event loop."""
    call = await in_thread(_make_call, runtime, prompts, sampling_params, checked)
    return call, await async_run_call(runtime, call, checked.get("timeout"), raise_on_error)
