"""The library's logger: structlog if the program has configured it, `logging` otherwise.

Structlog prints to standard output unless it is configured, and a library must not print. So events
go to the `logging` logger "enginepool", to which the program may add handlers. If its structlog
raises, a warning goes there too. A failure of logging ends no request and no engine.
"""

from __future__ import annotations

import logging
import traceback
from typing import Any

import structlog

_stdlib = logging.getLogger("enginepool")
_stdlib.addHandler(logging.NullHandler())
_fallback = structlog.wrap_logger(
    _stdlib,
    processors=[structlog.stdlib.filter_by_level, structlog.stdlib.render_to_log_kwargs],
    wrapper_class=structlog.stdlib.BoundLogger,
)


class _Logger:
    """A logger that never raises."""

    def __getattr__(self, level: str) -> Any:
        def log(event: str, **fields: Any) -> None:
            try:
                # Made for each event, because structlog may be configured at any time.
                configured = structlog.is_configured()
                base = structlog.get_logger("enginepool") if configured else _fallback
                getattr(base, level)(event, **fields)
            except Exception as error:  # a full disk, a closed stream, a processor of the program
                _stdlib.warning("enginepool.event_not_logged: %s: %r", event, error)

        return log


_logger = _Logger()


def logger() -> Any:
    """The library's logger."""
    return _logger


def take_traceback(error: BaseException) -> str:
    """The traceback as text. It is removed from the error, because its frames hold buffers."""
    trace = "".join(traceback.format_exception(error))
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        seen.append(link)
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return trace
