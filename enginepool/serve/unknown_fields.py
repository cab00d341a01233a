"""Refuses unknown names, at any depth of a body and in a query."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Collection
from typing import Any

from pydantic import BaseModel, ModelWrapValidatorHandler, model_validator
from starlette.datastructures import QueryParams

from enginepool.frontend.sampling import NAMES
from enginepool.serve.default_only import has_default, is_empty
from enginepool.serve.error_replies import Refused
from enginepool.serve.openapi_schema import INTERNAL
from enginepool.values import described, did_you_mean

# Taken and ignored: they are for a client's own use.
_CLIENT_FIELDS = frozenset(("metadata", "safety_identifier", "prompt_cache_key"))
# LiteLLM's, in a message that it sends back.
_INNER_CLIENT_FIELDS = frozenset(("provider_specific_fields",))
_SAMPLING = frozenset((*NAMES, "max_tokens", "min_tokens", "seed"))


class KnownFieldsOnly(BaseModel):
    """A body whose inner objects may only have names that its models know.

    Raises:
        Refused: An unknown name. Null, false and empty values are taken, so that a client may send
            a message back as it came.
    """

    @model_validator(mode="wrap")
    @classmethod
    def _known_fields_only(cls, values: Any, read: ModelWrapValidatorHandler[Any]) -> Any:
        made = read(values)
        read_as = vars(made)  # not getattr, which warns if OpenAI has deprecated the attribute
        for name, inner in values.items() if isinstance(values, dict) else ():
            check_inner(inner, read_as.get(name), name, param=name)
        return made


def check_inner(value: Any, made: Any, where: str, *, param: str) -> None:
    """Refuse names in inner objects that the models made from them do not have."""
    if isinstance(value, list) and isinstance(made, list):
        for index, (one, read) in enumerate(zip(value, made, strict=False)):
            check_inner(one, read, f"{where}.{index}", param=param)
    if not (isinstance(value, dict) and isinstance(made, BaseModel)):
        return
    fields = {field.alias or name: name for name, field in type(made).model_fields.items()}
    for name, inner in value.items():
        if name in fields:
            check_inner(inner, getattr(made, fields[name]), f"{where}.{name}", param=param)
        elif name not in _INNER_CLIENT_FIELDS and not is_empty(inner):
            raise unknown(f"{where}.{name}", inner, did_you_mean(name, fields), param)


def check_names(body: dict[str, Any], known: Collection[str], *, generates: bool) -> None:
    """Check a body's own names, and remove those that ask for nothing."""
    for name in sorted(body.keys() - known):
        value = body[name]
        if has_default(name, value) or (generates and name in _CLIENT_FIELDS):
            del body[name]
            continue
        raise unknown(name, value, _hint(name, known), name)


def check_query(query: QueryParams, known: Collection[str]) -> None:
    for name in query:
        if name not in known:
            raise unknown(name, query[name], _hint(name, known), name)


def names_of(endpoint: Callable[..., Any], argument: str) -> frozenset[str]:
    """The field names of the model of a route's `body` or `query`."""
    hint = typing.get_type_hints(endpoint).get(argument)
    (model, *_) = typing.get_args(hint) or (hint,)  # of `Model | None`
    if model is None:
        return frozenset()
    if dataclasses.is_dataclass(model):
        return frozenset(field.name for field in dataclasses.fields(model)) - INTERNAL
    return frozenset(model.model_fields)


def _hint(name: str, known: Collection[str]) -> str:
    if not known:
        return "; no fields are allowed here"
    if "sampling_params" in known and name in _SAMPLING:
        return "; it belongs in sampling_params"
    return did_you_mean(name, known)


def unknown(name: str, value: Any, hint: str, param: str) -> Refused:
    return Refused(
        400,
        f"unknown field {name}={described(value)}{hint or '; it would have no effect'}",
        param=param,
    )
