"""The log-probabilities of texts that are given, over all engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio.to_thread

from enginepool.dispatch.request import Call
from enginepool.frontend.score_input import make_score_call
from enginepool.pool.calls import CallGroup, async_run_call, run_call
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
        timeout: float | None = None,
        raise_on_error: bool = False,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """The log-probability of each token of a continuation, after its prompt; nothing is
        sampled.

        They are those of softmax(logits), at temperature 1. Prompts are computed beside what the
        engines generate, in turns with their steps, by programs of their own that are compiled at
        warm-up. All values of a result come from one set of weights, which
        `meta_info["weight_version"]` names: a prompt whose engine gets new weights is begun anew.

        Args:
            prompts: One text or a list of them; or token ids in `input_ids`.
            continuations: One a prompt, or several for a prompt that was given by itself; or
                token ids in `continuation_ids`. A text is tokenized by itself, without special
                tokens, and joined to its prompt's.
            top_logprobs_num: Give the most probable ids in each place as well; at most 20.
            token_ids_logprob: Give those of these ids in each place as well: one list for all
                continuations, or one a continuation, of 64 at most.
            timeout: Seconds for the whole call. What is not finished then keeps its place,
                without values, and `finish_reason {"type": "abort", "err_type": "timeout"}`.
            raise_on_error: Raise if one ended early, instead of returning it as it is.

        Returns:
            One dict a continuation, in input order; a lone dict for a lone prompt and a lone
            continuation. `logprobs` has one number a token of `continuation_ids`, `top_logprobs`
            and `token_ids_logprobs` (if asked for) a list of (logprob, id, None) a token. All are
            empty where it ended early.

        Raises:
            InvalidRequest: Bad input, before anything has started.
            PoolClosed, PoolFailed: As `generate_all`.
            RequestsFailed: With `raise_on_error`; `.results` has all results.
        """
        timeout, raises = seconds("timeout", timeout), flag("raise_on_error", raise_on_error)
        runtime = self._runtime()
        given = prompts, continuations, input_ids, continuation_ids
        call = _make_call(runtime, given, top_logprobs_num, token_ids_logprob)
        return _lone(call, run_call(runtime, call, timeout, raises))

    async def async_score(
        self,
        prompts: Texts = None,
        continuations: Texts = None,
        *,
        input_ids: Ids = None,
        continuation_ids: Ids = None,
        top_logprobs_num: int | None = None,
        token_ids_logprob: Named = None,
        timeout: float | None = None,
        raise_on_error: bool = False,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """`score` on an event loop. Cancelling ends the requests inside the engines."""
        timeout, raises = seconds("timeout", timeout), flag("raise_on_error", raise_on_error)
        runtime = await self._async_runtime()
        given = prompts, continuations, input_ids, continuation_ids
        call = await anyio.to_thread.run_sync(
            _make_call, runtime, given, top_logprobs_num, token_ids_logprob
        )
        return _lone(call, await async_run_call(runtime, call, timeout, raises))


def _make_call(
    runtime: Runtime,
    given: tuple[Any, ...],
    top_logprobs_num: int | None,
    token_ids_logprob: Named,
) -> Call:
    return make_score_call(
        runtime.input_processor,
        *given,
        top_logprobs_num=top_logprobs_num,
        token_ids_logprob=token_ids_logprob,
        weight_version=runtime.desired.weight_version,
    )


def _lone(call: Call, results: list[dict[str, Any]]) -> dict[str, Any] | list[dict[str, Any]]:
    return results[0] if call.lone else results
