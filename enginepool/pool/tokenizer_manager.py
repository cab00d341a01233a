"""Replaces upstream's TokenizerManager, for one engine or for the whole pool.

Upstream's Engine and its serving classes call this object instead of a TokenizerManager. So
`pool.engines[i].generate(...)` works. All calls go through the pool's checks, queue and channel.

What breaks: Upstream's Engine generates, streams and aborts through a TokenizerManager. It opens
sockets, installs signal handlers and drives its own event loop on the caller's thread.
Why: The TokenizerManager connects processes that a pool does not have.
Remove when: Upstream's Engine takes any object of a documented protocol. Until then, upstream may
read a name that this class lacks. Only the call that reads it raises AttributeError.

This module imports sgl_jax. Import it only after the patches are applied.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from anyio.from_thread import BlockingPortal, start_blocking_portal
from anyio.to_thread import run_sync
from sgl_jax.srt.managers.io_struct import FlushCacheReqOutput

from enginepool.dispatch.request import Call
from enginepool.dispatch.thinking import Thinking
from enginepool.dispatch.wait import async_chunks, submitted
from enginepool.errors import EnginePoolError, InvalidRequest
from enginepool.frontend.cancellation import in_thread
from enginepool.frontend.output_processor import make_chunk, raise_failure
from enginepool.frontend.score_input import make_score_call
from enginepool.pool.calls import async_run_call, single
from enginepool.runtime import pause, statistics
from enginepool.runtime.runtime import Runtime
from enginepool.values import is_int, plain, shown

if TYPE_CHECKING:
    from sgl_jax.srt.managers.io_struct import GenerateReqInput, PauseGenerationReqInput

    from enginepool.engine.worker import EngineWorker

# Fields of upstream's request models that a pool does not support.
UNSUPPORTED = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "lora_id",
    "return_hidden_states",
    "dp_rank",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "disagg_prefill_dp_rank",
    "disagg_transfer_id",
)


class FrontEnd:
    """The part of upstream's TokenizerManager that callers use, for one engine or for all.

    Attributes:
        runtime: The open pool.
    """

    def __init__(self, runtime: Runtime, pinned_to: int | None = None) -> None:
        self.runtime = runtime
        self._pinned_to = pinned_to
        worker = runtime.workers[pinned_to or 0]
        assert worker.engine is not None
        args = worker.engine.server_args
        self.server_args = args
        self.tokenizer = runtime.input_processor.tokenizer.hf
        self.model_config = runtime.model_config
        self.mm_processor = None
        self.model_path = args.model_path
        self.served_model_name = args.served_model_name
        self.is_generation = True
        self.max_req_input_len = worker.engine.scheduler_info["max_req_input_len"]
        self.rid_to_state: dict[str, Any] = {}
        self.event_loop = None

    async def generate_request(
        self, obj: GenerateReqInput, request: Any = None
    ) -> AsyncIterator[Any]:
        """Serve upstream's GenerateReqInput. Yields one result, or chunks if it streams."""
        del request
        call = await in_thread(self.make_call, obj)
        async for output in self.outputs(call, obj):
            yield output

    async def outputs(
        self, call: Call, obj: GenerateReqInput, timeout: float | None = None
    ) -> AsyncIterator[Any]:
        """Submit a call of `make_call` and yield what `generate_request` yields.

        Args:
            timeout: Seconds. An output that is unfinished by then ends with the tokens it has.
        """
        dispatch, tokenizer = self.runtime.dispatch, self.runtime.input_processor.tokenizer
        if obj.stream:
            with submitted(dispatch, call):
                async for chunk in async_chunks(dispatch, call, timeout):
                    yield make_chunk(chunk, tokenizer)
            raise_failure(call, tokenizer)
            return
        yield single(call, await async_run_call(self.runtime, call, timeout, False))

    def make_call(
        self,
        obj: GenerateReqInput,
        *,
        prompt_logprobs: int | None = None,
        clamp: bool = False,
        thinking: Thinking | None = None,
        special_tokens: bool | None = None,
    ) -> Call:
        """Check and tokenize upstream's GenerateReqInput. Nothing starts yet.

        Args:
            prompt_logprobs: Score the whole prompt, and return this many of the most probable
                tokens at each prompt token.
            clamp, thinking: See `InputProcessor.make_call`.
            special_tokens: `add_special_tokens` of `CallOptions`.
        """
        self.runtime.dispatch.process.check()
        for name in UNSUPPORTED:
            if _given(getattr(obj, name, None)):
                raise InvalidRequest(f"{name} is not supported in a pool")
        return_logprob = _one_for_all("return_logprob", obj.return_logprob)
        outputs_only = getattr(obj, "return_output_logprob_only", None)
        starts = _starts(obj.logprob_start_len)
        if starts is not None and (outputs_only or not return_logprob):
            raise InvalidRequest(
                f"logprob_start_len={shown(obj.logprob_start_len)}, the first prompt token that is "
                "scored, needs return_logprob=True, without return_output_logprob_only"
            )
        extra_key = _one_for_all("extra_key", getattr(obj, "extra_key", None))
        if not isinstance(extra_key, str | None):
            raise InvalidRequest(f"extra_key={shown(extra_key)}: expected a string")
        return self.runtime.input_processor.make_call(
            obj.text,
            obj.sampling_params,
            {
                "input_ids": obj.input_ids,
                "add_special_tokens": special_tokens,
                "return_logprob": outputs_only or return_logprob,
                "lora_path": getattr(obj, "lora_path", None),
                "top_logprobs_num": _one_for_all("top_logprobs_num", obj.top_logprobs_num),
                "token_ids_logprob": obj.token_ids_logprob,
                "return_sampling_mask": getattr(obj, "return_sampling_mask", None),
                "return_routed_experts": _one_for_all(
                    "return_routed_experts", obj.return_routed_experts
                ),
                "return_prompt_logprob": starts is not None or prompt_logprobs is not None,
                "logprob_start_len": starts if prompt_logprobs is None else None,
            },
            prompt_top_logprobs_num=prompt_logprobs,
            stream=obj.stream,
            clamp=clamp,
            thinking=thinking,
            pinned_to=self._pinned_to,
            extra_key=extra_key,
            rids=_as_list(obj.rid) if obj.rid else None,
            weight_version=self.runtime.desired.weight_version,
        )

    def make_score_call(
        self, input_ids: Any, continuation_ids: Any, named_ids: Any, lora_path: str | None
    ) -> Call:
        """The call of `pool.score`, with one request for each continuation."""
        return make_score_call(
            self.runtime.input_processor,
            None,
            None,
            input_ids,
            continuation_ids,
            token_ids_logprob=named_ids,
            lora_path=lora_path,
            pinned_to=self._pinned_to,
            weight_version=self.runtime.desired.weight_version,
        )

    def abort_request(self, rid: str | None = "", abort_all: bool = False) -> None:
        dispatch = self.runtime.dispatch
        requests = dispatch.unfinished() if abort_all else dispatch.find(rid or "")
        mine = [r for r in requests if self._pinned_to in (None, r.pinned_to)]
        dispatch.abort(mine, "abort_request", "cancelled")

    async def flush_cache(self) -> FlushCacheReqOutput:
        await run_sync(pause.flush_cache, self.runtime, self._pinned_to)
        return FlushCacheReqOutput(success=True)

    async def pause_generation(self, obj: PauseGenerationReqInput) -> None:
        await run_sync(pause.pause, self.runtime, obj.mode, self._pinned_to)

    async def continue_generation(self, obj: Any = None) -> None:
        del obj
        await run_sync(pause.resume, self.runtime, self._pinned_to)

    async def get_internal_state(self) -> list[dict[str, Any]]:
        return [statistics.engine(worker) for worker in self._workers()]

    async def get_load(self) -> list[dict[str, Any]]:
        return [statistics.load(worker) for worker in self._workers()]

    def shutdown(self) -> None:
        """Does nothing: the pool closes its engines."""

    def create_abort_task(self, obj: Any) -> None:
        """Does nothing. If a client disconnects, its task is cancelled, and that ends the
        request."""

    async def score_request(self, **_: Any) -> NoReturn:
        raise EnginePoolError("an engine's own score() is not supported: use pool.score()")

    def _workers(self) -> Sequence[EngineWorker]:
        workers = self.runtime.workers
        return workers if self._pinned_to is None else [workers[self._pinned_to]]


class PortalLoop:
    """The event loop of upstream's Engine. Any thread may call `run_until_complete`.

    Upstream's own loop belongs to one thread, and cannot run in a thread with a running loop. This
    one has its own thread, which starts at the first call.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._portal: BlockingPortal | None = None

    def run_until_complete[T](self, awaitable: Coroutine[Any, Any, T]) -> T:
        try:
            portal = self._open()
        except BaseException:
            awaitable.close()  # otherwise Python warns that it was never awaited
            raise
        return portal.call(lambda: awaitable)

    def _open(self) -> BlockingPortal:
        dispatch = self._runtime.dispatch
        dispatch.process.check()
        with dispatch.lock:
            dispatch.check_open()
            if self._portal is None:
                self._portal = self._runtime.guards.enter_context(
                    start_blocking_portal(name=f"{self._runtime.name}-portal")
                )
            return self._portal


def connect(runtime: Runtime) -> None:
    """Give each engine the front end and the loop that its methods use."""
    loop = PortalLoop(runtime)
    for worker in runtime.workers:
        assert worker.engine is not None
        engine: Any = worker.engine
        engine.tokenizer_manager = FrontEnd(runtime, worker.index)
        engine.loop = loop


def _given(value: Any) -> bool:
    value = plain(value)
    return any(_given(item) for item in value) if isinstance(value, list) else bool(value)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _starts(given: Any) -> Any:
    """Upstream's `logprob_start_len`. A negative number means None."""
    starts = plain(given)
    values = _as_list(starts)
    none = [start is None or (is_int(start) and start < 0) for start in values]
    if any(none) and not all(none):
        raise InvalidRequest(
            f"logprob_start_len={shown(given)}: give one for every prompt of a call, or none"
        )
    return None if all(none) else starts


def _one_for_all(name: str, value: Any) -> Any:
    values = _as_list(plain(value))
    if any(other != values[0] for other in values):
        raise InvalidRequest(f"{name}={shown(value)}: give one value for all prompts of a call")
    return values[0] if values else None
