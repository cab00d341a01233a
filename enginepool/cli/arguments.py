"""Options that several commands share, and the arguments of EnginePool made from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from enginepool.config import Warmup
from enginepool.errors import InvalidConfig
from enginepool.serve.options import LAST_PORT

Model = Annotated[str | None, typer.Option(help="Directory or hub id; left out, the toy.")]
Devices = Annotated[
    str | None, typer.Option(help="A count, or ids such as 0,2 (one id: 2,). Default: all.")
]
TpSize = Annotated[int, typer.Option(help="Devices of one engine.")]
Dtype = Annotated[str | None, typer.Option(help="As in ServerArgs.")]
ServerArg = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Any other option of ServerArgs; repeatable."),
]
WarmupOption = Annotated[Warmup, typer.Option(help="How programs are compiled.")]

# Options of a pool with a flag of their own. Most commands have the first three.
_COMMON = ("model", "devices", "tp_size")
_OWN_OPTIONS = (*_COMMON, "warmup")


def make_arguments(
    devices: str | None,
    tp_size: int,
    dtype: str | None,
    server_arg: Sequence[str] | None,
    **own: Any,
) -> dict[str, Any]:
    """Keyword arguments of EnginePool from the options that several commands have.

    Args:
        own: Further options of the command, by their names in EnginePool.
    """
    return {
        **parse_server_args(server_arg or [], (*_COMMON, *own)),
        **({} if dtype is None else {"dtype": dtype}),
        "devices": parse_devices(devices),
        "tp_size": tp_size,
        **own,
    }


def parse_devices(text: str | None) -> int | list[int] | None:
    """`4` is a count, `0,2` are ids, `2,` is one id."""
    if text is None:
        return None
    try:
        if "," not in text:
            return int(text)
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InvalidConfig(
            f"--devices {text!r}: expected a count such as 4, or ids such as 0,2"
        ) from None


def parse_ports(text: str | None) -> tuple[int, ...]:
    """`31000-31003` is a range, `31000,31005` a list."""
    if text is None:
        return ()
    first, dash, last = text.partition("-")
    try:
        given = [int(first), int(last)] if dash else list(map(int, text.strip(" ,").split(",")))
    except ValueError:
        given = []
    if not given:
        raise InvalidConfig(f"--ports {text!r}: expected a range such as 31000-31003, or a list")
    if not dash:
        return tuple(given)
    low, high = given
    if not 1 <= low <= high <= LAST_PORT:  # before the range is expanded
        raise InvalidConfig(
            f"--ports {text!r}: expected ports from 1 to {LAST_PORT}, the lower one first"
        )
    return tuple(range(low, high + 1))


def parse_server_args(pairs: Sequence[str], own: Sequence[str] = _COMMON) -> dict[str, Any]:
    """`NAME=VALUE` pairs; a value is JSON (1024, 0.8, true, [1, 8], null) or else a string.

    Args:
        own: Those of `_OWN_OPTIONS` that the command has.
    """
    parsed: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise InvalidConfig(f"--server-arg {pair!r}: expected NAME=VALUE")
        if name in _OWN_OPTIONS:
            flag = f"--{name.replace('_', '-')}"
            hint = f"use {flag}" if name in own else f"this command has no {flag}"
            raise InvalidConfig(f"--server-arg {pair!r}: {hint}")
        try:
            parsed[name] = json.loads(value)
        except ValueError:
            parsed[name] = value
    return parsed
