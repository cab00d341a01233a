"""The calls that generate, each with its async twin."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import anyio.to_thread

from enginepool.errors import InvalidRequest
from enginepool.progress import show_progress
from enginepool.requests import Call
from enginepool.results import call_results, make_chunk, make_result, raise_failure
from enginepool.runtime import Runtime
from enginepool.waiting import async_chunks, async_wait_all, chunks, wait_all

Prompts = str | Sequence[str] | None
Params = Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None
Messages = Sequence[Mapping[str, Any]]


class CallOptions(TypedDict, total=False):
    """Options of every call that generates.

    Attributes:
        input_ids: Token ids instead of text: one prompt, or a list of them.
        return_logprob: Give `meta_info["output_token_logprobs"]`, one (logprob, id, None) an id.
        top_logprobs_num: Give the most probable ids of each step as well; at most 20.
        timeout: Seconds for the whole call. What is not finished then keeps its place, with what
            it has and `finish_reason {"type": "abort", "err_type": "timeout"}`.
    """

    input_ids: Sequence[int] | Sequence[Sequence[int]] | None
    return_logprob: bool
    top_logprobs_num: int
    timeout: float | None


class Generation:
    """Mixin of `EnginePool`: what fans out over the engines. Every method is thread-safe.

    All raise InvalidRequest for bad input, before anything has started; PoolClosed when the pool
    is closed, or is closed meanwhile; and PoolFailed when no engine is left.
    """

    def _runtime(self) -> Runtime:
        raise NotImplementedError

    async def _async_runtime(self) -> Runtime:
        raise NotImplementedError

    def generate_all(
        self,
        prompts: Prompts = None,
        sampling_params: Params = None,
        *,
        progress: bool = False,
        raise_on_error: bool = False,
        **options: Unpack[CallOptions],
    ) -> list[dict[str, Any]]:
        """Generate for every prompt, over all engines; results in input order.

        Args:
            sampling_params: One dict for all prompts, or one a prompt. Without it the
                checkpoint's generation_config.json applies.
            progress: Show a progress bar on standard error.
            raise_on_error: Raise if an output ended early, instead of returning it as it is.
            options: See `CallOptions`.

        Returns:
            Upstream's result dicts. With n > 1 a flat list, grouped by prompt.

        Raises:
            RequestsFailed: With `raise_on_error`; `.results` has all results.
        """
        runtime = self._runtime()
        call, timeout = _make_call(runtime, prompts, sampling_params, options)
        with show_progress(call, progress) as tick:
            wait_all(runtime, call, timeout, tick)
        return call_results(call, runtime.intake.tokenizer, raise_on_error)

    async def async_generate_all(
        self,
        prompts: Prompts = None,
        sampling_params: Params = None,
        *,
        raise_on_error: bool = False,
        **options: Unpack[CallOptions],
    ) -> list[dict[str, Any]]:
        """`generate_all` on an event loop. Cancelling ends the requests inside the engines."""
        runtime = await self._async_runtime()
        call, timeout = await anyio.to_thread.run_sync(
            _make_call, runtime, prompts, sampling_params, options
        )
        await async_wait_all(runtime, call, timeout)
        return await anyio.to_thread.run_sync(
            call_results, call, runtime.intake.tokenizer, raise_on_error
        )

    def generate(
        self,
        prompt: Prompts = None,
        sampling_params: Params = None,
        *,
        raise_on_error: bool = False,
        **options: Unpack[CallOptions],
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Generate for one prompt: a dict, or with n > 1 (or a list of prompts) a list of them."""
        results = self.generate_all(
            prompt, sampling_params, raise_on_error=raise_on_error, **options
        )
        return _single(prompt, options, results)

    async def async_generate(
        self,
        prompt: Prompts = None,
        sampling_params: Params = None,
        *,
        raise_on_error: bool = False,
        **options: Unpack[CallOptions],
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """`generate` on an event loop. Cancelling ends the requests inside the engines."""
        results = await self.async_generate_all(
            prompt, sampling_params, raise_on_error=raise_on_error, **options
        )
        return _single(prompt, options, results)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[CallOptions],
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Generate the answer to a conversation, or to each of a list of them.

        Args:
            messages: `{"role": ..., "content": ...}` dicts, as the chat template takes them.
            chat_template_kwargs: Handed to the tokenizer's `apply_chat_template`.
        """
        runtime = self._runtime()
        ids = _apply_template(runtime, messages, chat_template_kwargs or {})
        return self.generate(sampling_params=sampling_params, **{**options, "input_ids": ids})

    async def async_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[CallOptions],
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """`chat` on an event loop."""
        runtime = await self._async_runtime()
        ids = await anyio.to_thread.run_sync(
            _apply_template, runtime, messages, chat_template_kwargs or {}
        )
        return await self.async_generate(
            sampling_params=sampling_params, **{**options, "input_ids": ids}
        )

    def as_completed(
        self,
        prompts: Prompts = None,
        sampling_params: Params = None,
        **options: Unpack[CallOptions],
    ) -> Iterator[dict[str, Any]]:
        """Yield each result when it is there; `meta_info["prompt_index"]` says whose it is.

        Bad input is raised by the call itself. Closing the iterator ends what still runs.
        """
        runtime = self._runtime()
        call, timeout = _make_call(runtime, prompts, sampling_params, options)
        return self._as_completed(runtime, call, timeout)

    def _as_completed(
        self, runtime: Runtime, call: Call, timeout: float | None
    ) -> Iterator[dict[str, Any]]:
        for chunk in chunks(runtime, call, timeout):
            yield make_result(chunk.request, runtime.intake.tokenizer)
        raise_failure(call, runtime.intake.tokenizer)

    async def async_as_completed(
        self,
        prompts: Prompts = None,
        sampling_params: Params = None,
        **options: Unpack[CallOptions],
    ) -> AsyncIterator[dict[str, Any]]:
        """`as_completed` on an event loop; bad input is raised at the first step."""
        runtime = await self._async_runtime()
        call, timeout = await anyio.to_thread.run_sync(
            _make_call, runtime, prompts, sampling_params, options
        )
        async for chunk in async_chunks(runtime, call, timeout):
            yield make_result(chunk.request, runtime.intake.tokenizer)
        raise_failure(call, runtime.intake.tokenizer)

    def stream(
        self,
        prompt: Prompts = None,
        sampling_params: Params = None,
        **options: Unpack[CallOptions],
    ) -> Iterator[dict[str, Any]]:
        """Yield upstream's chunks: the text and ids so far, and `index` of the output.

        Chunks that come faster than they are read are joined. The last chunk of an output has its
        `finish_reason` and equals its result. Closing the iterator ends what still runs.
        """
        runtime = self._runtime()
        call, timeout = _make_call(runtime, prompt, sampling_params, options, stream=True)
        return self._stream(runtime, call, timeout)

    def _stream(
        self, runtime: Runtime, call: Call, timeout: float | None
    ) -> Iterator[dict[str, Any]]:
        for chunk in chunks(runtime, call, timeout):
            yield make_chunk(chunk, runtime.intake.tokenizer)
        raise_failure(call, runtime.intake.tokenizer)

    async def async_stream(
        self,
        prompt: Prompts = None,
        sampling_params: Params = None,
        **options: Unpack[CallOptions],
    ) -> AsyncIterator[dict[str, Any]]:
        """`stream` on an event loop; bad input is raised at the first step."""
        runtime = await self._async_runtime()
        call, timeout = await anyio.to_thread.run_sync(
            lambda: _make_call(runtime, prompt, sampling_params, options, stream=True)
        )
        async for chunk in async_chunks(runtime, call, timeout):
            yield make_chunk(chunk, runtime.intake.tokenizer)
        raise_failure(call, runtime.intake.tokenizer)


def _make_call(
    runtime: Runtime,
    prompts: Prompts,
    sampling_params: Params,
    options: Mapping[str, Any],
    *,
    stream: bool = False,
) -> tuple[Call, float | None]:
    given = dict(options)
    timeout, input_ids = given.pop("timeout", None), given.pop("input_ids", None)
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise InvalidRequest(f"timeout={timeout!r}: expected seconds above 0, or None for no limit")
    call = runtime.intake.make_call(
        prompts,
        sampling_params,
        input_ids,
        stream=stream,
        weight_version=runtime.weight_version,
        **given,
    )
    return call, timeout


def _single(
    prompt: Prompts, options: Mapping[str, Any], results: list[dict[str, Any]]
) -> dict[str, Any] | list[dict[str, Any]]:
    """As upstream: a lone result for a lone prompt."""
    ids = options.get("input_ids")
    lone = isinstance(prompt, str) or (
        ids is not None and len(ids) > 0 and not hasattr(ids[0], "__iter__")
    )
    return results[0] if lone and len(results) == 1 else results


def _apply_template(
    runtime: Runtime, messages: Any, template_options: Mapping[str, Any]
) -> list[int] | list[list[int]]:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise InvalidRequest(f"chat: expected a list of messages, got {messages!r}")
    if not messages:
        raise InvalidRequest("chat: messages are empty")
    apply = runtime.intake.tokenizer.apply_chat_template
    if isinstance(messages[0], Mapping):
        return apply(0, messages, **template_options)
    return [apply(index, one, **template_options) for index, one in enumerate(messages)]
