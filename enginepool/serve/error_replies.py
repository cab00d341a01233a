"""Replies to failures: a status, OpenAI's error object, and when to try again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from enginepool.errors import (
    EnginePoolError,
    InvalidConfig,
    InvalidRequest,
    InvalidWeights,
    PoolClosed,
    PoolFailed,
    QueueFull,
    WeightUpdateFailed,
)
from enginepool.logs import logger
from enginepool.values import described

CLIENT_GONE = 499  # the client has left, so nobody gets this status
_WORD = re.compile(r"[\w.-]{1,40}", re.ASCII)
_LONGEST = 2000  # characters of a message; values in it may have any length
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable",
    504: "timeout",
}


class Refused(EnginePoolError):
    """A request that the server itself answers with an error.

    Attributes:
        retry_after: Seconds after which another try makes sense; None where none does.
        headers: Further headers of the reply.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.retry_after, self.headers = retry_after, headers or {}


def as_refused(error: Exception) -> Refused:
    """The error that a client gets for a failure."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, InvalidRequest | InvalidWeights | InvalidConfig):
        return Refused(400, str(error))
    if isinstance(error, QueueFull):
        return Refused(429, str(error), code="queue_full", retry_after=1)
    if isinstance(error, PoolFailed | PoolClosed):
        return Refused(503, str(error), code="no_engine", retry_after=10)
    if isinstance(error, WeightUpdateFailed):  # engines have failed, and come back
        return Refused(503, str(error), code="WeightUpdateFailed", retry_after=10)
    if isinstance(error, EnginePoolError):
        return Refused(500, str(error), code=type(error).__name__)
    if isinstance(error, RequestValidationError):
        return _invalid_body(error.errors())
    if isinstance(error, HTTPException):
        return Refused(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, ClientDisconnect):
        return Refused(CLIENT_GONE, "the client left before its body had come")
    logger().error("enginepool.internal_error", exc_info=error)
    return Refused(500, f"internal error ({type(error).__name__}); the server's log has it")


def error_object(error: Exception) -> dict[str, Any]:
    """OpenAI's `{"error": {...}}`."""
    refused = as_refused(error)
    kind = _TYPES.get(refused.status)
    if kind is None:
        kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": _shortened(str(refused)),
            "type": kind,
            "param": refused.param,
            "code": refused.code,
        }
    }


def error_reply(error: Exception, *, admin: bool = False) -> Response:
    """The reply to a request that failed. With `admin` it has the fields of `AdminError`, in the
    place of OpenAI's error object."""
    refused = as_refused(error)
    body = error_object(refused)
    if admin:
        message = body["error"]["message"]
        body = {"ok": False, "error": message, "success": False, "message": message}
        body["error_message"] = message
    headers = dict(refused.headers)
    if refused.retry_after is not None:
        headers["Retry-After"] = str(refused.retry_after)
    elif refused.status >= 500:
        headers["x-should-retry"] = "false"  # OpenAI's clients heed it
    if refused.status == 408:
        headers["Connection"] = "close"  # the rest of the body may never come
    if refused.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    # ASCII, because a quoted value may have half a surrogate pair, which UTF-8 cannot encode.
    return Response(json.dumps(body), refused.status, headers, media_type="application/json")


def _invalid_body(errors: Sequence[Any]) -> Refused:
    """The first few problems of a body. pydantic's `input` is not copied: for a missing field, it
    is the whole object around that field."""
    told, params = [], []
    for error in errors[:5]:
        if error["type"] == "json_invalid":
            return Refused(400, f"the body is not JSON: {error['ctx']['error']}")
        where = ".".join(str(part) for part in error["loc"][1:])
        params.append(str(error["loc"][1]) if len(error["loc"]) > 1 else None)
        told.append(f"{where or 'body'}{_describe_value(error)}: {error['msg']}")
    return Refused(400, "; ".join(told), param=params[0] if params else None)


def _describe_value(error: Any) -> str:
    """Describe the value that was sent. It is quoted if it is a short word and the field takes one
    of a few words."""
    value = error.get("input")
    if error["type"] == "missing":
        return ""
    if error["type"] == "literal_error" and isinstance(value, str) and _WORD.fullmatch(value):
        return f"={value!r}"
    return f"={described(value)}"


def _shortened(text: str) -> str:
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} … {text[-half:]}"
