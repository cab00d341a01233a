"""Parts of the OpenAPI document that no route's model gives: errors, streams, and corrections."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

# Fields of upstream's GenerateReqInput for its own use.
INTERNAL = frozenset(("batch_size", "is_single", "http_worker_ipc"))


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """OpenAI's error object."""

    error: ErrorDetail


class AdminError(BaseModel):
    """The error fields that clients of `/admin/…` and sglang's clients read."""

    ok: bool
    error: str
    success: bool
    message: str
    error_message: str


_MEANINGS = {
    400: "The request cannot be served. The message has the value and the limit.",
    401: "No API key or token, or a wrong one.",
    403: "Not allowed from this address, or not for this directory.",
    404: "There is no such route, model or adapter.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    429: "Too many requests wait; see Retry-After.",
    500: "An engine or device failed.",
    503: "No engine can serve now; see Retry-After.",
    504: "Not finished within the server's time limit.",
}


def errors(*statuses: int, model: type[BaseModel] = Error) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": model, "description": _MEANINGS[status]} for status in statuses}


GENERATION_ERRORS = errors(400, 401, 404, 408, 413, 429, 500, 503, 504)
NOT_FOUND = errors(401, 404)
ADMIN_ERRORS = errors(400, 401, 403, 404, 408, 413, 500, 503, model=AdminError)


# OpenAPI 3.1 cannot describe a stream. This is the schema of one event.
_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A chunk in JSON, or `[DONE]`."}},
    "required": ["data"],
}


def events(model: type[BaseModel] | None = None) -> dict[str, Any]:
    """The reply with status 200: JSON or, with `"stream": true`, server-sent events."""
    reply: dict[str, Any] = {
        "description": 'JSON, or with "stream": true server-sent events up to `[DONE]`.',
        "content": {"text/event-stream": {"schema": _EVENT}},
    }
    if model is not None:
        reply["model"] = model
    return reply


def as_served(document: dict[str, Any]) -> dict[str, Any]:
    """Correct FastAPI's document: a body that does not fit is answered with 400, not 422, and
    unknown names are refused."""
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            for content in operation.get("requestBody", {}).get("content", {}).values():
                schema = _model(content["schema"], document["components"]["schemas"])
                schema["additionalProperties"] = False
                for name in INTERNAL:
                    schema["properties"].pop(name, None)
    return document


def _model(schema: dict[str, Any], models: dict[str, Any]) -> dict[str, Any]:
    """The object of a body's schema, which may be optional."""
    for one in (schema, *schema.get("anyOf", ())):
        if "$ref" in one:
            return models[one["$ref"].rpartition("/")[2]]
    return schema
