"""One HTTP request that generates, from its body to its last byte."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from anyio.to_thread import run_sync
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from enginepool.dispatch.request import Call
from enginepool.dispatch.thinking import Thinking
from enginepool.frontend.cancellation import in_thread
from enginepool.frontend.score_input import prompt_entries
from enginepool.serve.error_replies import error_object, error_reply
from enginepool.serve.options import ServeOptions
from enginepool.serve.record import (
    CLIENT_GONE,
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
from enginepool.serve.sampling_wire import as_taken, has_grammar
from enginepool.serve.wire_extras import name_tokens

if TYPE_CHECKING:
    from enginepool.pool.tokenizer_manager import FrontEnd

# Log-probabilities of outputs that are written down in a few milliseconds.
_MANY_VALUES = 1 << 11
_DONE = ("data: [DONE]\n\n", b"data: [DONE]\n\n")  # upstream's, and ours


class ExchangeHost(Protocol):
    """The server, as far as its exchanges know it. (Its own module imports this one.)"""

    max_queued: int | None

    def check_open(self) -> None: ...

    def claim(self, exchange: Exchange, rids: frozenset[str]) -> None: ...

    def began(self, exchange: Exchange) -> None: ...

    def ended(self, exchange: Exchange, record: ExchangeRecord) -> None: ...


class Exchange:
    """Upstream's serving classes take it for their TokenizerManager: it has the front end's
    attributes, and `generate_request` gives what `begin` has begun.

    Attributes:
        tokenizer: In place of the front end's.
        call: The pool's side of it, once the body was found to be good.
        rids: The client's own ids of its requests.
        token_names: The name of a token in log-probabilities, in the place of its text.
        names_own: Where the most probable tokens are not asked for, each place names its own.
        reads_new: Who reads a stream looks in each output at what is new there, and at no more.
        watchers: Told of every output of a stream, which they may change.
        failure: What ended a streamed reply early.
    """

    def __init__(
        self,
        host: ExchangeHost,
        front: FrontEnd,
        rendering: Rendering,
        options: ServeOptions,
        raw: Request,
    ) -> None:
        self._host, self._front, self._options, self._raw = host, front, options, raw
        self.tokenizer = rendering
        self.call: Call | None = None
        self.rids: frozenset[str] = frozenset()
        self.token_names: Callable[[int], str] = rendering.token_text
        self.names_own = self.reads_new = False
        self.watchers: list[Callable[[dict[str, Any]], None]] = []
        self.failure: Exception | None = None
        self._started = time.perf_counter()
        self._first_output_seconds: float | None = None
        self._outputs: AsyncIterator[Any] | None = None
        self._first: Any = None
        self._texts = True
        self._seen: dict[int, int] = {}  # of each output of a stream, how many tokens
        self._ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._front, name)

    async def run(self, reply: Callable[[], Awaitable[Response]]) -> Response:
        """The reply, or the error's. Ends the requests in the engines if the client leaves."""
        self._host.began(self)
        try:
            response = await _while_present(self._raw, reply())
        except Exception as error:
            response = error_reply(error)
            self.failure = error
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
        obj: Any,
        id_prefix: str | None = None,
        prompt_logprobs: int | None = None,
        thinking: Thinking | None = None,
    ) -> None:
        """Submit upstream's GenerateReqInput and wait for the first that it yields.

        So everything that can be refused is, before the status of a streamed reply is sent.

        Args:
            id_prefix: Of the one id that all its outputs carry, as OpenAI's do; None for one each.
            prompt_logprobs, thinking: See `FrontEnd.make_call`.
        """
        self._host.check_open()
        obj.sampling_params = as_taken(obj.sampling_params)
        prompts = count_prompts(obj)
        check_counts(obj, prompts, self._options, self._host.max_queued)
        given, rids = obj.rid, rids_of(obj.rid, prompts, id_prefix)
        if given is not None:
            self._host.claim(self, frozenset(rids or ()))
        obj.rid = rids
        self._texts = obj.return_text_in_logprobs
        limiter = self.tokenizer.large if prompt_size(obj) > LARGE else None
        if limiter is None and has_grammar(obj.sampling_params):
            limiter = self.tokenizer.grammars
        self.call = await in_thread(
            self._make_call, obj, prompt_logprobs, thinking, limiter=limiter
        )
        self._outputs = self._front.outputs(self.call, obj, self._options.request_timeout)
        self._first = await anext(self._outputs)
        if obj.stream:
            self._first_output_seconds = time.perf_counter() - self._started
        raise_if_lost(self._first, nothing_yet=bool(obj.stream))

    def _make_call(self, obj: Any, prompt_logprobs: int | None, thinking: Thinking | None) -> Call:
        for text in [obj.text] if isinstance(obj.text, str) else obj.text or ():
            self.tokenizer.check_text(text)
        call = self._front.make_call(
            obj,
            prompt_logprobs=prompt_logprobs,
            clamp=self._options.clamp_max_new_tokens,
            thinking=thinking,
        )
        check_values(call)
        return call

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        """As upstream's: the result, or chunks."""
        del obj, request
        assert self._outputs is not None
        try:
            yield await self._dress(self._first)
            async for output in self._outputs:
                yield await self._dress(output)
        except Exception as error:
            self.failure = error
            raise ValueError(str(error)) from error  # the only kind that all of upstream's catch

    def stream(self, pieces: AsyncIterator[Any]) -> StreamingResponse:
        """Server-sent events. What ends them early, or cuts an output short, is told at the end by
        one of OpenAI's error objects: its clients raise it."""
        return _Stream(self, self._told(pieces))

    async def _told(self, pieces: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for piece in pieces:
            if self.failure is not None:
                break
            if piece not in _DONE:
                yield piece
        if (error := self._early_end()) is not None:
            yield f"data: {json.dumps(error_object(error))}\n\n"
        yield _DONE[0]

    def end(self, status: int) -> None:
        """Tell the server, and end in the engines what nobody waits for any more."""
        if self._ended:
            return
        self._ended = True
        failure = self._early_end()
        if self.call is not None and not self.call.done:
            self._front.runtime.dispatch.abort(self.call.requests, "the client left", "cancelled")
        record = ExchangeRecord(
            path=self._raw.scope["path"],  # that of its URL takes in what the `Host` header says
            status=status,
            outcome=outcome_of(status, failure),
            error=None if failure is None else str(failure),
            seconds=time.perf_counter() - self._started,
            first_output_seconds=self._first_output_seconds,
            outputs=() if self.call is None else outputs_of(self.call),
        )
        self._host.ended(self, record)

    def _early_end(self) -> Exception | None:
        if self.failure is None and self.call is not None:
            return cut_short(self.call)
        return self.failure

    async def beside[T](self, make: Callable[[], T], outputs: Sequence[Any]) -> T:
        """What is made of these outputs; beside the event loop, if they have many values."""
        assert self.call is not None
        first = self.call.requests[0]
        tokens = sum(len(one["output_ids"]) for one in outputs) if first.return_logprob else 0
        values = tokens * (1 + first.top_logprobs_num + len(first.named_ids))
        # Prompts that are scored may be long.
        if first.scoring is None and values < _MANY_VALUES:
            return make()
        return await run_sync(make)

    async def _dress(self, output: Any) -> Any:
        assert self.call is not None
        if self.reads_new and self.call.requests[0].scoring is None:
            return self._dressed(output)
        outputs = output if isinstance(output, list) else [output]
        return await self.beside(lambda: self._dressed(output), outputs)

    def _dressed(self, output: Any) -> Any:
        """Log-probabilities as upstream's classes read them: with each token's text, and those of
        the prompt with the first chunk of a stream, too."""
        for one in output if isinstance(output, list) else [output]:
            meta = one["meta_info"]
            since = 0 if (index := one.get("index")) is None else self._see(one, index)
            name = self.token_names if self._texts else None
            for kind, first in (("input", 0), ("output", since if self.reads_new else 0)):
                if f"{kind}_token_logprobs" in meta:
                    name_tokens(meta, kind, name, own=self.names_own, since=first)
        return output

    def _see(self, chunk: dict[str, Any], index: int) -> int:
        """Returns how many tokens of it were there before."""
        assert self.call is not None
        request = self.call.requests[index]
        if request.scoring is not None and index not in self._seen:
            chunk["meta_info"] |= prompt_entries(request)
        since, self._seen[index] = self._seen.get(index, 0), len(chunk["output_ids"])
        for watch in self.watchers:
            watch(chunk)
        return since


class _Stream(StreamingResponse):
    """Whatever ends the reply, the exchange ends with it."""

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


async def _while_present(raw: Request, work: Awaitable[Response]) -> Response | None:
    """Await `work` while the client is there; cancel it, and return None, when it leaves."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_left(raw))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _left(raw: Request) -> None:
    while (await raw.receive())["type"] != "http.disconnect":
        pass
