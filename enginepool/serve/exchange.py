"""One HTTP request that generates, from its body to its last byte."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from anyio.to_thread import run_sync
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from enginepool.dispatch.request import Call
from enginepool.dispatch.thinking import Thinking
from enginepool.frontend.cancellation import in_thread
from enginepool.frontend.score_input import prompt_entries
from enginepool.serve.connections import while_present
from enginepool.serve.error_replies import (
    CLIENT_GONE,
    Refused,
    as_refused,
    error_object,
    error_reply,
)
from enginepool.serve.open_exchanges import OpenExchanges
from enginepool.serve.options import ServeOptions
from enginepool.serve.record import (
    ExchangeRecord,
    cut_short,
    outcome_of,
    outputs_of,
    raise_if_lost,
)
from enginepool.serve.rendering import LARGE, Rendering
from enginepool.serve.request_limits import (
    check_counts,
    check_values,
    count_prompts,
    prompt_size,
    rids_of,
)
from enginepool.serve.sampling_wire import has_grammar, translate_params
from enginepool.serve.served_models import ServedModels
from enginepool.serve.wire_extras import name_tokens, takes_long

if TYPE_CHECKING:
    from sgl_jax.srt.managers.io_struct import GenerateReqInput

    from enginepool.pool.tokenizer_manager import FrontEnd

_DONE = "data: [DONE]\n\n"


class Exchange:
    """Replaces the TokenizerManager of upstream's serving classes.

    It has the front end's attributes. `generate_request` yields the outputs of the call that
    `begin` has submitted.

    Attributes:
        tokenizer: Replaces the front end's.
        models: What `model` can name.
        call: The pool's call, once the body has passed its checks.
        rids: The client's own ids of its requests.
        token_names: Gives the name of a token in log-probabilities.
        sampled_as_top: Whether the sampled token is listed in the place of top log-probabilities,
            if none are wanted.
        reads_new: Whether the reader of a stream looks only at the new tokens of each output.
        watchers: Called with every output of a stream; they may change it.
        failure: The error that ended a reply early.
    """

    def __init__(
        self,
        exchanges: OpenExchanges,
        front: FrontEnd,
        rendering: Rendering,
        models: ServedModels,
        options: ServeOptions,
        raw: Request,
    ) -> None:
        self._exchanges, self._front, self._options, self._raw = exchanges, front, options, raw
        self.tokenizer, self.models = rendering, models
        self._max_queued = front.runtime.config.max_queued
        self.call: Call | None = None
        self.rids: frozenset[str] = frozenset()
        self.token_names: Callable[[int], str] = rendering.token_text
        self.sampled_as_top = self.reads_new = False
        self.watchers: list[Callable[[dict[str, Any]], None]] = []
        self.failure: Refused | None = None
        self._started = time.perf_counter()
        self._first_output_seconds: float | None = None
        self._outputs: AsyncIterator[Any] | None = None
        self._first: Any = None
        self._wants_names = True
        self._seen: dict[int, int] = {}  # of each output of a stream, how many tokens
        self._ended = False
        self._aborts = exchanges.aborts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._front, name)

    async def run(self, reply: Callable[[], Awaitable[Response]]) -> Response:
        """The reply, or an error's reply. If the client leaves, its requests are aborted."""
        self._exchanges.began()
        try:
            response = await while_present(self._raw, reply())
        except Exception as error:
            self.failure = as_refused(error)
            response = error_reply(self.failure)
        except BaseException:
            self.end(CLIENT_GONE)
            raise
        if response is None:
            response = Response(status_code=CLIENT_GONE)
        if not isinstance(response, StreamingResponse):
            self.end(response.status_code)
        return response

    async def begin(
        self,
        obj: GenerateReqInput,
        id_prefix: str | None = None,
        prompt_logprobs: int | None = None,
        thinking: Thinking | None = None,
        *,
        special_tokens: bool | None = None,
    ) -> None:
        """Submit upstream's GenerateReqInput and wait for its first output.

        So a request is refused before the status of a streamed reply is sent.

        Args:
            id_prefix: All outputs share one id with this prefix, as OpenAI's do. With None, each
                has an id of its own.
            prompt_logprobs, thinking, special_tokens: See `FrontEnd.make_call`.
        """
        self._exchanges.check_open()
        obj.sampling_params = translate_params(obj.sampling_params)
        prompts = count_prompts(obj)
        check_counts(obj, prompts, self._options, self._max_queued)
        given, rids = obj.rid, rids_of(obj.rid, prompts, id_prefix)
        if given is not None:
            self.rids = self._exchanges.claim(frozenset(rids or ()))
        obj.rid = rids
        self._wants_names = obj.return_text_in_logprobs
        limiter = self.tokenizer.large if prompt_size(obj) > LARGE else None
        if limiter is None and has_grammar(obj.sampling_params):
            limiter = self.tokenizer.grammars
        async with self.models.loaded(obj.lora_path):
            self.call = await in_thread(
                self._make_call, obj, prompt_logprobs, thinking, special_tokens, limiter=limiter
            )
        self._before_submission(self.call)
        self._outputs = self._front.outputs(self.call, obj, self._options.request_timeout)
        self._first = await anext(self._outputs)
        if obj.stream:
            self._first_output_seconds = time.perf_counter() - self._started
        raise_if_lost(self._first, self.call, nothing_yet=bool(obj.stream))

    def _make_call(
        self,
        obj: GenerateReqInput,
        prompt_logprobs: int | None,
        thinking: Thinking | None,
        special_tokens: bool | None,
    ) -> Call:
        for text in [obj.text] if isinstance(obj.text, str) else obj.text or ():
            self.tokenizer.check_text(text)
        call = self._front.make_call(
            obj,
            prompt_logprobs=prompt_logprobs,
            clamp=self._options.clamp_max_new_tokens,
            thinking=thinking,
            special_tokens=special_tokens,
        )
        check_values(call)
        return call

    def _before_submission(self, call: Call) -> None:
        """Raise if the drain's time is over. Abort what was aborted while the call was made."""
        self._exchanges.check_cut()
        was_aborted = self._exchanges.was_aborted
        if aborted := [one for one in call.requests if was_aborted(one, self._aborts)]:
            self._front.runtime.dispatch.abort(aborted, "abort_request", "cancelled")

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        """Replaces upstream's method of this name: yields the result, or chunks."""
        del obj, request
        assert self._outputs is not None
        try:
            yield await self._with_token_names(self._first)
            async for output in self._outputs:
                yield await self._with_token_names(output)
        except Exception as error:
            self.failure = as_refused(error)
            raise ValueError(str(error)) from error  # all of upstream's classes catch only this

    def stream(self, pieces: AsyncIterator[Any]) -> StreamingResponse:
        """Server-sent events. An error in `pieces`, or an output that was cut short, is an error
        object at the end, which OpenAI's clients raise."""
        return _Stream(self, self._with_error_at_end(pieces))

    async def _with_error_at_end(self, pieces: AsyncIterator[Any]) -> AsyncIterator[Any]:
        try:
            async for piece in pieces:
                if self.failure is not None:
                    break
                if piece != _DONE:
                    yield piece
        except Exception as error:  # upstream's parsers of calls and reasoning raise anything
            self.failure = self.failure or as_refused(error)  # `generate_request` has the original
        if (error := self._early_end()) is not None:
            yield f"data: {json.dumps(error_object(error))}\n\n"
        yield _DONE

    def end(self, status: int) -> None:
        """Record the end, and abort requests that nobody waits for any more."""
        if self._ended:
            return
        self._ended = True
        failure = self._early_end()
        if self.call is not None and not self.call.done:
            self._front.runtime.dispatch.abort(self.call.requests, "the client left", "cancelled")
        record = ExchangeRecord(
            path=self._raw.scope["path"],  # `url.path` also depends on the client's Host header
            status=status,
            outcome=outcome_of(status, failure),
            error=None if failure is None else str(failure),
            seconds=time.perf_counter() - self._started,
            first_output_seconds=self._first_output_seconds,
            outputs=() if self.call is None else outputs_of(self.call),
        )
        self._exchanges.ended(record, self.rids)

    def _early_end(self) -> Refused | None:
        if self.failure is None and self.call is not None:
            return cut_short(self.call)
        return self.failure

    async def on_thread_if_large[T](self, make: Callable[[], T], outputs: Sequence[Any]) -> T:
        """Call `make`, on a thread if these outputs have many log-probabilities."""
        assert self.call is not None
        return await run_sync(make) if takes_long(self.call, outputs) else make()

    async def _with_token_names(self, output: Any) -> Any:
        assert self.call is not None
        if self.reads_new and self.call.requests[0].scoring is None:
            return self._with_names(output)
        outputs = output if isinstance(output, list) else [output]
        return await self.on_thread_if_large(lambda: self._with_names(output), outputs)

    def _with_names(self, output: Any) -> Any:
        """Put token names into log-probabilities, as upstream's classes expect them. Put the
        prompt's log-probabilities into the first chunk of a stream."""
        for one in output if isinstance(output, list) else [output]:
            meta = one["meta_info"]
            since = 0 if (index := one.get("index")) is None else self._note_tokens(one, index)
            name = self.token_names if self._wants_names else None
            for kind, first in (("input", 0), ("output", since if self.reads_new else 0)):
                if f"{kind}_token_logprobs" in meta:
                    name_tokens(meta, kind, name, sampled_as_top=self.sampled_as_top, since=first)
        return output

    def _note_tokens(self, chunk: dict[str, Any], index: int) -> int:
        """Note a chunk of an output. Returns how many tokens the chunk before it had."""
        assert self.call is not None
        request = self.call.requests[index]
        if request.scoring is not None and index not in self._seen:
            chunk["meta_info"] |= prompt_entries(request)
        since, self._seen[index] = self._seen.get(index, 0), len(chunk["output_ids"])
        for watch in self.watchers:
            watch(chunk)
        return since


class _Stream(StreamingResponse):
    """A streamed reply that ends its exchange, however it ends."""

    def __init__(self, exchange: Exchange, pieces: AsyncIterator[Any]) -> None:
        super().__init__(pieces, media_type="text/event-stream")
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            call, failure = self._exchange.call, self._exchange.failure
            gone = failure is None and call is not None and not call.done
            self._exchange.end(CLIENT_GONE if gone else self.status_code)
