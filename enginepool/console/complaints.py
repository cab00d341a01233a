"""Errors of the command line: one line on standard error, and an exit code."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

from typer.core import TyperGroup

from enginepool.console.output import OutputLost
from enginepool.errors import EnginePoolError, InvalidConfig, InvalidRequest


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Print our errors as one line and exit: with 2 for wrong input, with 1 for other errors.

    Ctrl-C exits with 130. If the program that read the output has ended, the code is 141, without a
    line. These are the codes of a program that was ended by SIGINT or SIGPIPE.
    """
    try:
        yield
    except EnginePoolError as error:
        complain(str(error))
        mistake = isinstance(error, (InvalidConfig, InvalidRequest))
        raise SystemExit(2 if mistake else 1) from None
    except OutputLost as lost:
        if lost.unread:
            raise SystemExit(128 + signal.SIGPIPE) from None
        complain(str(lost))
        raise SystemExit(1) from None
    except KeyboardInterrupt as interrupt:
        complain(str(interrupt) or "interrupted")
        raise SystemExit(128 + signal.SIGINT) from None


class Commands(TyperGroup):
    """All commands. `clear_errors` replaces typer's own handling of errors and Ctrl-C."""

    def main(self, *args: Any, **options: Any) -> Any:
        with clear_errors():
            try:
                return super().main(*args, **options)
            finally:
                sys.stdout.flush()

    def invoke(self, ctx: Any) -> Any:
        with clear_errors():
            return super().invoke(ctx)


def complain(message: str) -> None:
    if sys.stderr is not None:  # otherwise `print` would use standard output
        with contextlib.suppress(OSError, ValueError):  # nobody can read it; the exit code remains
            print("enginepool:", " ".join(message.split()), file=sys.stderr)
