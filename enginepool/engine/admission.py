"""A request in the form that upstream's scheduler takes, with the outputs that it already has.

Imports sgl_jax: import it only after the patches are applied.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from sgl_jax.srt.managers.io_struct import TokenizedGenerateReqInput

from enginepool.engine.grammar import RequestGrammar
from enginepool.model_config.generation import end_ids

if TYPE_CHECKING:
    from sgl_jax.srt.managers.schedule_batch import Req

    from enginepool.dispatch.request import Request


def message(request: Request, extra_key: str | None) -> TokenizedGenerateReqInput:
    """Make upstream's message for a request.

    Every request asks for output-only log-probabilities, so that there is only one program. If only
    some requests of a batch asked for them, upstream would raise an error in its loop.

    Args:
        extra_key: The prefix cache's namespace.
    """
    sampling: Any = copy.copy(request.sampling)  # upstream declares dicts and takes the object
    return TokenizedGenerateReqInput(
        rid=request.internal_rid,
        text=request.text,
        input_ids=request.input_ids,
        sampling_params=sampling,
        return_logprob=False,
        return_output_logprob_only=True,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=request.stream,
        extra_key=extra_key,
        dp_rank=0,
    )


def fill(req: Req, request: Request) -> None:
    """Put into upstream's request what its message does not carry: the outputs so far, the grammar,
    and that it has an adapter."""
    if request.output_ids:
        req.output_ids = list(request.output_ids)
        req.output_token_logprobs_val = list(request.logprobs)
        req.output_token_logprobs_idx = list(request.output_ids)
    if request.adapter is not None:
        req.lora_id = request.internal_rid  # the request's, because its adapter may be replaced
    if request.grammar is not None:
        ends = end_ids(req.eos_token_ids, req.tokenizer)
        target: Any = req
        target.grammar = RequestGrammar(request.grammar, ends, request.output_ids, request.thinking)
