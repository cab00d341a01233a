"""`score`: the log-probabilities of given texts, on all engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio.to_thread

from enginepool.dispatch.request import Call
from enginepool.frontend.score_input import make_score_call
from enginepool.pool.calls import CallGroup, async_run_call, run_call, single
from enginepool.runtime.runtime import Runtime
from enginepool.values import flag, seconds

Texts = str | Sequence[str] | None
Ids = Sequence[int] | Sequence[Sequence[int]] | None
Named = Sequence[int] | Sequence[Sequence[int] | None] | None


class ScoreCalls(CallGroup):
    """Mixin of `EnginePool`. Every method is thread-safe."""

    def score(
        self,
        prompts: Texts = None,
        continuations: Texts = None,
        *,
        input_ids: Ids = None,
        continuation_ids: Ids = None,
        top_logprobs_num: int | None = None,
        token_ids_logprob: Named = None,
        lora_path: str | Sequence[str | None] | None = None,
        timeout: float | None = None,
        raise_on_error: bool = False,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Compute the log-probability of each token of a continuation after its prompt.

        Nothing is sampled. The log-probabilities are those of softmax(logits), at temperature 1.
        Engines score between the steps of running requests, with programs that are compiled at
        warm-up. All values of a result come from the weights that `meta_info["weight_version"]`
        names. If an engine gets new weights meanwhile, it scores the prompt again from its start.

        Args:
            prompts: One text or a list of texts. Or give token ids in `input_ids`.
            continuations: One text per prompt, or several for one prompt. Or give token ids in
                `continuation_ids`. Each text is tokenized alone, without special tokens; its ids
                follow those of the prompt.
            top_logprobs_num: Also return the most probable ids at each token, 20 at most.
            token_ids_logprob: Also return the log-probabilities of these ids at each token. Give
                one list for all continuations or one list per continuation, of 64 ids at most.
            lora_path: The name of the adapter to score with, for all or one per continuation. None
                is the base.
            timeout: Seconds for the whole call. A continuation that is not finished by then keeps
                its place in the results, without values and with
                `finish_reason {"type": "abort", "err_type": "timeout"}`.
            raise_on_error: Raise if a continuation ended early. Otherwise it is returned as it is.

        Returns:
            One dict per continuation, in input order. One prompt with one continuation gives the
            dict itself. `logprobs` has one number for each token of `continuation_ids`.
            `top_logprobs` and `token_ids_logprobs`, if asked for, have one list of
            (logprob, id, None) for each token. All are empty if the continuation ended early.

        Raises:
            InvalidRequest: Bad input, before anything has started.
            PoolClosed, PoolFailed: As `generate_all`.
            RequestsFailed: A continuation ended early, with `raise_on_error`. `.results` has all
                results.
        """
        timeout, raises = seconds("timeout", timeout), flag("raise_on_error", raise_on_error)
        runtime = self.runtime
        given = prompts, continuations, input_ids, continuation_ids
        call = _make_call(runtime, given, top_logprobs_num, token_ids_logprob, lora_path)
        return single(call, run_call(runtime, call, timeout, raises))

    async def async_score(
        self,
        prompts: Texts = None,
        continuations: Texts = None,
        *,
        input_ids: Ids = None,
        continuation_ids: Ids = None,
        top_logprobs_num: int | None = None,
        token_ids_logprob: Named = None,
        lora_path: str | Sequence[str | None] | None = None,
        timeout: float | None = None,
        raise_on_error: bool = False,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """`score` on an event loop. Cancelling ends the requests inside the engines."""
        timeout, raises = seconds("timeout", timeout), flag("raise_on_error", raise_on_error)
        runtime = await self._async_runtime()
        given = prompts, continuations, input_ids, continuation_ids
        call = await anyio.to_thread.run_sync(
            _make_call, runtime, given, top_logprobs_num, token_ids_logprob, lora_path
        )
        return single(call, await async_run_call(runtime, call, timeout, raises))


def _make_call(
    runtime: Runtime,
    given: tuple[Any, ...],
    top_logprobs_num: int | None,
    token_ids_logprob: Named,
    lora_path: Any,
) -> Call:
    return make_score_call(
        runtime.input_processor,
        *given,
        top_logprobs_num=top_logprobs_num,
        token_ids_logprob=token_ids_logprob,
        lora_path=lora_path,
        weight_version=runtime.desired.weight_version,
    )
