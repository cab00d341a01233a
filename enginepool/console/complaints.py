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
    """Print an error of ours as one line, and exit: with 2 for input that must be changed, else 1.

    After Ctrl-C the code is 130, and where nobody reads the output any more 141, without a line:
    what a shell sees of a program that the signal ended.
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
    """All commands, with clear errors. typer's own handling of Ctrl-C and its own output are
    inside."""

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
    if sys.stderr is not None:  # or `print` would take standard output
        with contextlib.suppress(OSError, ValueError):  # nobody can be told; the exit code stays
            print("enginepool:", " ".join(message.split()), file=sys.stderr)
