"""Upstream's `ServerArgs` on the command line of `serve`: every option under its own flag."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from enginepool.errors import InvalidConfig
from enginepool.values import did_you_mean, shown

# Where upstream's flag and field have different names.
_FIELDS = {"tensor_parallel_size": "tp_size", "data_parallel_size": "dp_size"}


@dataclass(frozen=True)
class FromFile:
    """Options of a file that the command itself does not know.

    Attributes:
        own: The options that the command knows.
    """

    path: Path
    values: Mapping[str, Any]
    own: Collection[str]


class _Parser(argparse.ArgumentParser):
    """Knows its options by name."""

    def __init__(self) -> None:
        super().__init__(allow_abbrev=False, add_help=False, usage=argparse.SUPPRESS)
        self.options: dict[str, argparse.Action] = {}

    def add_argument(self, *flags: Any, **options: Any) -> argparse.Action:
        action = super().add_argument(*flags, **options)
        self.options |= {_name(flag): action for flag in action.option_strings}
        return action

    def error(self, message: str) -> NoReturn:
        raise InvalidConfig(message)


def parse_upstream_flags(
    args: Sequence[str], from_file: FromFile | None = None
) -> tuple[str | None, dict[str, Any]]:
    """The model, and the fields of `ServerArgs` that were given; imports sgl_jax.

    Args:
        from_file: Options of a file. The arguments override them.

    Raises:
        InvalidConfig: A flag is unknown (the error suggests the nearest), or does not accept its
            value.
    """
    model, given = _parse(args)
    if from_file is not None:
        try:
            default, defaults = _parse(_as_flags(from_file))
        except InvalidConfig as error:
            raise InvalidConfig(f"--config {from_file.path}: {error}") from None
        model, given = model or default, defaults | given
    return model, given


def upstream_help(hidden: Collection[str]) -> str:
    """The help of `ServerArgs` for its flags.

    Args:
        hidden: Options that are the command's own.
    """
    from enginepool.server_args import REFUSED, REFUSED_PREFIXES, server_args_class

    upstream = server_args_class()
    fields = {field.name for field in dataclasses.fields(upstream)}
    parser = _Parser()
    upstream.add_cli_args(parser)
    for name, action in parser.options.items():
        field = _FIELDS.get(name, name)
        refused = field in REFUSED or field.startswith(tuple(REFUSED_PREFIXES))
        if name in hidden or refused or _FIELDS.get(action.dest, action.dest) not in fields:
            action.help = argparse.SUPPRESS
    return parser.format_help()


def _parse(args: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
    from enginepool.server_args import server_args_class

    upstream = server_args_class()
    parser = _Parser()
    parser.add_argument("model", nargs="?")
    upstream.add_cli_args(parser)
    # Upstream requires a model; here the toy replaces it.
    defaults = vars(parser.parse_args(["--model-path", ""]))
    unset = object()
    parser.set_defaults(**dict.fromkeys(defaults, unset))
    known, unknown = parser.parse_known_args(["--model-path", "", *args])
    if unknown:
        raise InvalidConfig(_unknown(unknown[0], defaults))
    given = {
        _FIELDS.get(name, name): value for name, value in vars(known).items() if value is not unset
    }
    model = given.pop("model", None)
    by_flag = given.pop("model_path") or None
    if model is not None and by_flag is not None:
        raise InvalidConfig(f"two models, {model!r} and --model-path {by_flag!r}: give one")
    fields = {field.name for field in dataclasses.fields(upstream)}
    for name in given:
        if name not in fields:
            raise InvalidConfig(f"--{name.replace('_', '-')} means nothing in a pool")
    return model or by_flag, given


def _as_flags(file: FromFile) -> list[str]:
    """Turn the values into a command line, so that both are checked in the same way."""
    from enginepool.server_args import server_args_class

    parser = _Parser()
    server_args_class().add_cli_args(parser)
    flags: list[str] = []
    named: dict[argparse.Action, str] = {}
    for given, value in file.values.items():
        name = "model_path" if given == "model" else given
        action = parser.options.get(name)
        if action is None:
            hint = did_you_mean(name, [*file.own, *parser.options])
            raise InvalidConfig(f"unknown option {name}={shown(value)}{hint}")
        if action in named:  # the parser would take the last one
            raise InvalidConfig(f"{named[action]} and {given} are one option; give one of them")
        named[action] = given
        if value is not None:
            flags += _as_flag(name, action, value)
    return flags


def _as_flag(name: str, action: argparse.Action, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise InvalidConfig(f"{name}={shown(value)}: expected true or false")
        if isinstance(action, argparse.BooleanOptionalAction):
            return [flag if value else f"--no-{flag[2:]}"]
        return [flag] if value is action.const else []
    if isinstance(value, list) and action.nargs is not None:
        return [flag, *map(str, value)]
    text = value if isinstance(value, str) else json.dumps(value)
    return [f"{flag}={text}"]


def _name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _unknown(argument: str, known: Mapping[str, Any]) -> str:
    flag = argument.partition("=")[0]
    flags = [f"--{name.replace('_', '-')}" for name in known]
    return f"unknown argument {argument!r}{did_you_mean(flag, flags)}"
