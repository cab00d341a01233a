"""`chat`: renders a conversation with the chat template, and generates. It has an async twin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import anyio.to_thread

from enginepool.errors import InvalidRequest
from enginepool.frontend.call_options import CallOptions, Params, check_options
from enginepool.pool.calls import CallGroup, single
from enginepool.pool.generate import async_run, run
from enginepool.runtime.runtime import Runtime
from enginepool.values import described, flag

Messages = Sequence[Mapping[str, Any]]


class ChatCalls(CallGroup):
    """Mixin of `EnginePool`. Thread-safe. Both methods raise what `generate` raises."""

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        raise_on_error: bool = False,
        **options: Unpack[CallOptions],
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Generate the answer to a conversation, or to each of a list of them.

        Args:
            messages: A list of `{"role": ..., "content": ...}` dicts, or a list of such lists.
            chat_template_kwargs: Arguments of the tokenizer's `apply_chat_template`.
        """
        checked = check_options("chat", options)
        raises = flag("raise_on_error", raise_on_error)
        runtime = self.runtime
        checked["input_ids"] = _apply_template(runtime, messages, chat_template_kwargs)
        return single(*run(runtime, None, sampling_params, checked, raises))

    async def async_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        raise_on_error: bool = False,
        **options: Unpack[CallOptions],
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """`chat` on an event loop."""
        checked = check_options("chat", options)
        raises = flag("raise_on_error", raise_on_error)
        runtime = await self._async_runtime()
        checked["input_ids"] = await anyio.to_thread.run_sync(
            _apply_template, runtime, messages, chat_template_kwargs
        )
        return single(*await async_run(runtime, None, sampling_params, checked, raises))


def _apply_template(
    runtime: Runtime, messages: Any, template_options: Any
) -> list[int] | list[list[int]]:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise InvalidRequest(f"chat: expected a list of messages, got {described(messages)}")
    if not messages:
        raise InvalidRequest("chat: messages are empty")
    template_options = {} if template_options is None else template_options
    if not (isinstance(template_options, Mapping) and all(map(_is_argument, template_options))):
        raise InvalidRequest(
            f"chat_template_kwargs={described(template_options)}: expected a dict by argument name"
        )
    apply = runtime.input_processor.tokenizer.apply_chat_template
    if isinstance(messages[0], Mapping):
        return apply(0, messages, **template_options)
    return [apply(index, one, **template_options) for index, one in enumerate(messages)]


def _is_argument(key: Any) -> bool:
    return isinstance(key, str) and key not in ("self", "index", "messages")
