"""Upstream's `ServerArgs` on the command line of `serve`: every option under its own flag."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

from enginepool.errors import InvalidConfig
from enginepool.values import did_you_mean

# Where upstream's flag and field have different names.
_FIELDS = {"tensor_parallel_size": "tp_size", "data_parallel_size": "dp_size"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidConfig(message)


def parse_upstream_flags(args: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
    """The model, and the fields of `ServerArgs` that were given; imports sgl_jax.

    Raises:
        InvalidConfig: An unknown flag, with the nearest, or a value that it does not take.
    """
    from enginepool.config import server_args_class

    upstream = server_args_class()
    parser = _Parser(allow_abbrev=False, add_help=False)
    parser.add_argument("model", nargs="?")
    upstream.add_cli_args(parser)
    # Upstream requires a model; here the toy stands in.
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


def _unknown(argument: str, known: dict[str, Any]) -> str:
    flag = argument.partition("=")[0]
    flags = [f"--{name.replace('_', '-')}" for name in known]
    hint = did_you_mean(flag, flags) if len(flag.strip("-")) > 1 else ""  # many have that letter
    return f"unknown argument {argument!r}{hint}"
