"""Turns a body's fields for structured output and tool calls into sampling parameters.

Reaches into upstream's parsers of tool calls, which know how a model writes them.

What breaks: With `tool_choice` of "required" or a tool's name upstream has the model write a bare
JSON list. In a stream its parser finds no calls in the list. An unknown tool is ignored silently,
and so is `response_format` together with tools. A schema's properties are sorted alphabetically.
Why: Upstream makes the schema without the parser, which knows the model's own form of calls.
Remove when: Upstream constrains the output to the form that its parser reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from sgl_jax.srt.entrypoints.openai.protocol import ToolChoice
from sgl_jax.srt.function_call.function_call_parser import FunctionCallParser
from sgl_jax.srt.function_call.utils import get_json_schema_constraint

from enginepool.dispatch.grammar import KINDS
from enginepool.serve.error_replies import Refused

if TYPE_CHECKING:
    from sgl_jax.srt.entrypoints.openai.protocol import Tool
    from sgl_jax.srt.server_args import ServerArgs

# llguidance's keyword, put into a schema: JSON without optional whitespace.
_COMPACT = {"x-guidance": {"whitespace_flexible": False}}


class StructuredOutputs(BaseModel):
    """vLLM's field. Exactly one of its names is given."""

    model_config = ConfigDict(populate_by_name=True)

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1)
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None

    @model_validator(mode="after")
    def one_of_them(self) -> StructuredOutputs:
        if sum(value is not None for value in self.__dict__.values()) != 1:
            raise ValueError("give exactly one of json, regex, choice, grammar, json_object and "
                             "structural_tag")  # fmt: skip
        return self

    def as_sampling_params(self) -> dict[str, Any]:
        if self.choice is not None:
            # As a regex, because a grammar of over 2,000 alternatives takes too long for a step.
            return {"regex": "|".join(map(re.escape, self.choice))}
        if self.json_object is not None:
            return {"json_schema": {"type": "object"}} if self.json_object else {}
        named = {
            "json_schema": self.json_,
            "regex": self.regex,
            "ebnf": self.grammar,
            "structural_tag": self.structural_tag,
        }
        return {kind: value for kind, value in named.items() if value is not None}


def form_of(body: Any, server_args: ServerArgs, special_tokens: Collection[str]) -> dict[str, Any]:
    """The grammar that a body asks for, if any, as sampling parameters of a pool.

    Raises:
        Refused: Two fields ask for different forms, or one asks for a form that is not supported.
    """
    asked = {kind: {kind: getattr(body, kind, None)} for kind in KINDS}
    asked["structured_outputs"] = (
        body.structured_outputs and body.structured_outputs.as_sampling_params()
    )
    text = _of_format(getattr(body, "response_format", None))
    if getattr(body, "tools", None) and body.tool_choice != "none":
        parser = server_args.tool_call_parser
        assert parser is not None, "check_fields refuses tools without one"
        compact = server_args.constrained_json_disable_any_whitespace
        schema = text.pop("json_schema", None)  # for an answer without a call
        asked["tools"] = _of_tools(
            body, parser, special_tokens, _COMPACT if compact else {}, schema
        )
    asked["response_format"] = text
    given = {
        name: {kind: value for kind, value in form.items() if value is not None}
        for name, form in asked.items()
        if form
    }
    made = {name: form for name, form in given.items() if form}
    if len(made) > 1:
        raise Refused(
            400, f"{' and '.join(made)}: each sets the form of the answer; give one of them",
            param=next(iter(made)),
        )  # fmt: skip
    return next(iter(made.values()), {})


def _of_format(wanted: Any) -> dict[str, Any]:
    if wanted is None:
        return {}
    if wanted.type != "json_schema" and getattr(wanted, "json_schema", None) is not None:
        raise Refused(
            400, f"response_format of type {wanted.type} with json_schema: expected type "
            "json_schema, or no schema",
            param="response_format",
        )  # fmt: skip
    if wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return {"json_schema": {"type": "object"}}
    if wanted.type == "structural_tag":
        return {"structural_tag": wanted.model_dump(by_alias=True)}
    schema = wanted.json_schema and wanted.json_schema.schema_
    if not schema:
        raise Refused(
            400, "response_format of type json_schema: expected json_schema.schema, an object; "
            "for any JSON object send type json_object",
            param="response_format",
        )  # fmt: skip
    return {"json_schema": schema}


def _of_tools(
    body: Any,
    parser_name: str,
    special_tokens: Collection[str],
    json_options: Mapping[str, Any],
    text: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The grammar of tool calls. `text` is the schema of an answer without a call."""
    parser: Any = FunctionCallParser(body.tools, parser_name)
    own_form = parser.detector.supports_structural_tag()
    if body.tool_choice == "auto":
        if text is None:
            return _of_free_choice(body, parser_name, parser, own_form, json_options)
        if not own_form:
            raise Refused(
                400, f"response_format with tools is not supported for the calls of {parser_name}; "
                'leave one of them out, or send tool_choice="required"',
                param="response_format",
            )  # fmt: skip
    if own_form:
        text = text if body.tool_choice == "auto" else None
        return {"ebnf": _calls(parser, body, special_tokens, json_options, text)}
    _chosen(body)
    if body.stream:
        raise Refused(
            400, f"tool_choice={_shown(body.tool_choice)} is not supported in a stream for the "
            f"calls of {parser_name}; leave stream=true out",
            param="tool_choice",
        )  # fmt: skip
    choice: Any = body.tool_choice
    schema = get_json_schema_constraint(body.tools, choice) or {}
    return {"json_schema": schema if body.parallel_tool_calls else {**schema, "maxItems": 1}}


def _of_free_choice(
    body: Any,
    parser_name: str,
    parser: Any,
    own_form: bool,
    json_options: Mapping[str, Any],
) -> dict[str, Any]:
    """The grammar of an answer of text and calls. Only `strict` calls are constrained."""
    if not body.parallel_tool_calls:
        raise Refused(
            400, 'parallel_tool_calls=false: with tool_choice="auto" the number of calls cannot be '
            'limited; send tool_choice="required" or a tool\'s name, or leave it out',
            param="parallel_tool_calls",
        )  # fmt: skip
    if not any(tool.function.strict for tool in body.tools):
        return {}
    if not own_form:
        raise Refused(
            400, f"strict: the calls of {parser_name} cannot be constrained by a schema; "
            'leave it out, or send tool_choice="required"',
            param="tools",
        )  # fmt: skip
    tag = parser.get_structure_tag().model_dump(by_alias=True)
    for structure in tag["structures"]:
        structure["schema"] = {**json_options, **(structure["schema"] or {})}
    return {"structural_tag": tag}


def _chosen(body: Any) -> Sequence[Tool]:
    """The tools that the answer may call."""
    if not isinstance(body.tool_choice, ToolChoice):
        return body.tools
    chosen = [tool for tool in body.tools if tool.function.name == body.tool_choice.function.name]
    if not chosen:
        names = [tool.function.name for tool in body.tools]
        raise Refused(
            400, f"tool_choice={_shown(body.tool_choice)}: it is not among the tools {names}",
            param="tool_choice",
        )  # fmt: skip
    return chosen


def _calls(
    parser: Any,
    body: Any,
    special_tokens: Collection[str],
    json_options: Mapping[str, Any],
    text: Mapping[str, Any] | None,
) -> str:
    """A grammar of calls in the model's own form: one call of a named tool, or one or more calls.
    With `text`, an answer by that schema is allowed instead."""
    describe = parser.detector.structure_info()
    rules = []
    for index, tool in enumerate(_chosen(body)):
        info = describe(tool.function.name)
        begin = _literal(info.begin)
        if info.trigger in special_tokens and info.begin.startswith(info.trigger):
            begin = f"{info.trigger} {_literal(info.begin[len(info.trigger) :])}"
        schema = json.dumps({**json_options, **_arguments(tool)})
        rules.append(f"call_{index}: {begin} %json {schema} {_literal(info.end)}")
    names = " | ".join(f"call_{index}" for index in range(len(rules)))
    one = isinstance(body.tool_choice, ToolChoice) or not body.parallel_tool_calls
    more = "" if one else f" ({_literal(parser.detector.tool_call_separator)} call)*"
    start = f"start: call{more}"
    if text is not None:
        start += " | text"
        rules.append(f"text: %json {json.dumps({**json_options, **text})}")
    return "\n".join(["%llguidance {}", start, f"call: {names}", *rules])


def _arguments(tool: Any) -> Mapping[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}


def _literal(text: str) -> str:
    """A literal of llguidance's grammars."""
    return json.dumps(text) if text else ""


def _shown(choice: str | ToolChoice) -> str:
    return repr(choice if isinstance(choice, str) else choice.function.name)
