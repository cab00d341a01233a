"""How the command line says that something is wrong: one line on standard error, an exit code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import typer

from enginepool.errors import EnginePoolError, InvalidConfig, InvalidRequest


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """What enginepool raises becomes one line; 2 for input that must be changed, else 1."""
    try:
        yield
    except EnginePoolError as error:
        complain(str(error))
        mistake = isinstance(error, (InvalidConfig, InvalidRequest))
        raise typer.Exit(2 if mistake else 1) from None
    except KeyboardInterrupt:
        complain("interrupted")
        raise typer.Exit(130) from None


def complain(message: str) -> None:
    """One line; the exit code says it, too, where standard error cannot be written."""
    with contextlib.suppress(OSError, ValueError):
        print("enginepool:", " ".join(message.split()), file=sys.stderr)
