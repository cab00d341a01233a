"""The library's logger: structlog's where the host configured it, silent otherwise.

Unconfigured structlog prints to standard output, and a library prints nothing. Then events go to
the standard `logging` logger "enginepool", whose handlers are the host's. They go there, too, where
the host's structlog fails: an event that cannot be logged ends no request and no engine.
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
    """A bound logger whose calls do not raise."""

    def __init__(self, bound: Any) -> None:
        self._bound = bound

    def __getattr__(self, level: str) -> Any:
        def log(event: str, **fields: Any) -> None:
            try:
                getattr(self._bound, level)(event, **fields)
            except Exception as error:  # a full disk, a closed stream, a processor of the host's
                _stdlib.warning("enginepool.event_not_logged: %s: %r", event, error)

        return log


def logger(**bound: Any) -> Any:
    """A bound logger, looked up anew each time: the host may configure structlog at any time."""
    base = structlog.get_logger("enginepool") if structlog.is_configured() else _fallback
    return _Logger(base.bind(**bound))


def take_traceback(error: BaseException) -> str:
    """The traceback as Python prints it. The error keeps none: its frames hold buffers."""
    trace = "".join(traceback.format_exception(error))
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        seen.append(link)
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return trace
