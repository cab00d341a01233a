"""Limits of a request: its body, its number of prompts and samples, its ids.

Limits of one prompt are in `prompt_limits`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from enginepool.dispatch.request import Call
from enginepool.errors import InvalidRequest
from enginepool.serve.error_replies import Refused
from enginepool.serve.options import ServeOptions
from enginepool.values import shown

if TYPE_CHECKING:
    from sgl_jax.srt.managers.io_struct import GenerateReqInput

MAX_RID = 256  # characters of a request's id
MAX_VALUES = 1 << 20  # log-probabilities of prompts in one reply


class BodyLimit:
    """Refuses a body of more than `limit` bytes, by its announced length or while it comes, and one
    that takes longer than `seconds`."""

    def __init__(
        self, app: ASGIApp, limit: int, seconds: float, refuse: Callable[[str, Refused], ASGIApp]
    ) -> None:
        self.app = app
        self._refuse = refuse
        self._limit, self._seconds = limit, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > self._limit:
            refused = Refused(413, self._message(f"{announced} bytes"))
            await self._refuse(scope["path"], refused)(scope, receive, send)
            return
        await self.app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        seen, more = 0, True
        until = time.monotonic() + self._seconds

        async def counted() -> Message:
            nonlocal seen, more
            if not more:  # the next message says that the client left
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), until - time.monotonic())
            except TimeoutError:
                raise Refused(
                    408, f"the body took longer than {self._seconds:g} seconds (--body-timeout)"
                ) from None
            seen, more = seen + len(message.get("body", b"")), message.get("more_body", False)
            if seen > self._limit:
                raise Refused(413, self._message(f"{seen} bytes or more"))
            return message

        return counted

    def _message(self, size: str) -> str:
        return f"the body has {size}: at most {self._limit} are taken (--max-body-bytes)"


def check_counts(
    obj: GenerateReqInput, prompts: int, options: ServeOptions, max_queued: int | None
) -> None:
    """Limit the prompts and samples of one body."""
    if not prompts:
        raise InvalidRequest("there is no prompt")
    if prompts > options.max_prompts:
        raise InvalidRequest(
            f"{prompts} prompts: at most {options.max_prompts} are taken in one request "
            "(--max-prompts)"
        )
    params = obj.sampling_params
    samples = [_samples(one) for one in (params if isinstance(params, list) else [params])]
    for n in samples:
        if n > options.max_n:
            raise InvalidRequest(f"n={n}: at most {options.max_n} are sampled (--max-n)")
    count = sum(samples) if isinstance(params, list) else prompts * samples[0]
    if max_queued is not None and count > max_queued:
        raise InvalidRequest(
            f"{count} requests ({prompts} prompts and their samples) are too many for one call: at "
            f"most {max_queued} may wait (--max-queued-requests); send several, or raise it"
        )


def check_values(call: Call) -> None:
    """Limit the log-probabilities of prompts in a reply; every sample repeats its prompt's."""
    values = sum(
        (len(request.input_ids) - scoring.start)
        * (1 + scoring.top_logprobs_num + len(scoring.named_ids))
        for request in call.requests
        if (scoring := request.scoring) is not None
    )
    if values > MAX_VALUES:
        raise InvalidRequest(
            f"{values} log-probabilities of prompts are too many for one reply: at most "
            f"{MAX_VALUES}; ask for fewer at each token, or for fewer samples, or send several"
        )


def rids_of(rid: Any, prompts: int, prefix: str | None) -> list[str] | None:
    """The id of each prompt's outputs: the client's own, or one that is made here.

    Args:
        prefix: Begins the one id that all outputs carry, if the client gave none.
    """
    if rid is None:
        return None if prefix is None else [f"{prefix}{uuid.uuid4().hex}"] * prompts
    if isinstance(rid, list):
        if len(rid) != prompts:
            raise InvalidRequest(f"rid has {len(rid)} ids for {prompts} prompts")
        _check_rids(rid)
        return rid
    _check_rids([rid])
    if prefix is not None or prompts == 1:
        return [rid] * prompts
    return [f"{rid}_{index}" for index in range(prompts)]  # as upstream names them


def _check_rids(rids: list[str]) -> None:
    """A client's own ids, each for a prompt."""
    if len(set(rids)) < len(rids):
        twice = next(rid for rid in rids if rids.count(rid) > 1)
        raise InvalidRequest(f"rid={shown(twice)} is given twice: give each prompt its own")
    for rid in rids:
        if not 0 < len(rid) <= MAX_RID:
            raise InvalidRequest(f"rid={shown(rid)}: expected 1 to {MAX_RID} characters")


def _samples(params: Any) -> int:
    n = params.get("n") if isinstance(params, Mapping) else None
    return n if isinstance(n, int) else 1


def count_prompts(obj: GenerateReqInput) -> int:
    """How many prompts upstream's GenerateReqInput has."""
    if obj.text is not None:
        return 1 if isinstance(obj.text, str) else len(obj.text)
    ids = obj.input_ids
    if not ids:
        return 0
    return 1 if isinstance(ids[0], int) else len(ids)


def prompt_size(obj: Any) -> int:
    """Characters, or token ids, of all its prompts."""
    prompts = obj.text if obj.text is not None else obj.input_ids
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        return len(prompts)
    return sum(map(len, prompts))
