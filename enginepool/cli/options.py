"""Options that several commands of the command line have."""

from __future__ import annotations

from typing import Annotated

import typer

from enginepool.config import Warmup

Model = Annotated[str | None, typer.Option(help="Directory or hub id; left out, the toy.")]
Devices = Annotated[
    str | None, typer.Option(help="A count, or ids as in 0,2 (one id: 2,). Default: all.")
]
TpSize = Annotated[int, typer.Option(help="Devices of one engine.")]
Dtype = Annotated[str | None, typer.Option(help="As in ServerArgs.")]
ServerArg = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Any other option of ServerArgs; repeatable."),
]
WarmupOption = Annotated[Warmup, typer.Option(help="How programs are compiled.")]
