"""The record of a finished HTTP exchange, for the log, the metrics and the history."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from enginepool.dispatch.request import Call, Request
from enginepool.serve.error_replies import CLIENT_GONE, Refused


@dataclass(frozen=True, slots=True)
class OutputRecord:
    """One sample of one prompt. A sample that still runs is about to be cancelled.

    Attributes:
        rid: The caller's id, or the pool's own.
        prompt_tokens: 0 if no engine has computed any of it.
        finish_reason: The finish reason's `type`.
        seconds: Seconds from submission on; `first_token_seconds` counts from there, too.
        queue_seconds: Seconds until an engine took the sample; None if no engine did.
    """

    rid: str
    engine_index: int | None
    sample_index: int
    prompt: str | list[int]
    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int
    finish_reason: str
    seconds: float
    first_token_seconds: float | None
    queue_seconds: float | None


@dataclass(frozen=True, slots=True)
class ExchangeRecord:
    """One HTTP request that generated, or was refused before it could.

    Attributes:
        outcome: The reason why it ended, in a word.
        seconds: None if the request was refused unread.
        first_output_seconds: Seconds to the first output of a streamed reply.
    """

    path: str
    status: int
    outcome: str
    error: str | None = None
    seconds: float | None = None
    first_output_seconds: float | None = None
    outputs: tuple[OutputRecord, ...] = ()


def outputs_of(call: Call) -> tuple[OutputRecord, ...]:
    """The outputs of a call as they are now."""
    now = time.perf_counter()
    return tuple(_output(request, now) for request in call.requests)


def _output(request: Request, now: float) -> OutputRecord:
    first, taken = request.first_token_at, request.taken_at
    return OutputRecord(
        rid=request.shown_rid,
        engine_index=request.engine_index,
        sample_index=request.sample_index,
        prompt=request.text or request.input_ids,
        prompt_tokens=len(request.input_ids) if request.ran else 0,
        cached_tokens=request.cached_tokens,
        completion_tokens=len(request.output_ids),
        finish_reason=(request.finish_reason or {"type": "abort"})["type"],
        seconds=(request.finished_at or now) - request.created,
        first_token_seconds=first - request.created if first else None,
        queue_seconds=taken - request.created if taken else None,
    )


def ended_early(reason: Mapping[str, Any]) -> Refused:
    """The error that a client gets for an output with finish reason "abort"."""
    kind = reason["err_type"]
    status = {"timeout": 504, "draining": 503, "cancelled": 503, "grammar": 400}.get(kind, 500)
    code = "aborted" if kind == "cancelled" else kind
    retry_after = 10 if kind == "draining" else None
    return Refused(status, reason["message"], code=code, retry_after=retry_after)


def cut_short(call: Call) -> Refused | None:
    """The error of a call's first aborted output. None if no output was aborted."""
    reasons = [r.finish_reason for r in call.requests if r.finish_reason is not None]
    for reason in reasons:
        if reason["type"] == "abort":
            return ended_early(reason)
    return None


def raise_if_lost(output: Any, call: Call, *, nothing_yet: bool) -> None:
    """Raise if an output ended by a timeout, the drain or failing engines. An output that somebody
    aborted is returned, as upstream's are.

    Args:
        nothing_yet: Raise only if there is no output yet. A stream reports the other cases itself.
    """
    for one in output if isinstance(output, list) else [output]:
        reason = one["meta_info"]["finish_reason"] or {}
        if reason.get("type") != "abort" or reason["err_type"] == "cancelled":
            continue
        if not (nothing_yet and one["output_ids"]):
            raise call.failure or ended_early(reason)


def outcome_of(status: int, failure: Refused | None) -> str:
    """A word for metrics and the log."""
    if status == CLIENT_GONE:
        return "disconnected"
    if failure is not None:
        return failure.code or ("refused" if failure.status < 500 else "error")
    return "ok" if status < 400 else "refused"
