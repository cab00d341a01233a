"""The library's logger: structlog's where the host configured it, silent otherwise.

Unconfigured structlog prints to standard output, and a library prints nothing. Then events go to
the standard `logging` logger "enginepool", whose handlers are the host's.
"""

from __future__ import annotations

import logging
from typing import Any

import structlog

_stdlib = logging.getLogger("enginepool")
_stdlib.addHandler(logging.NullHandler())
_fallback = structlog.wrap_logger(
    _stdlib,
    processors=[structlog.stdlib.filter_by_level, structlog.stdlib.render_to_log_kwargs],
    wrapper_class=structlog.stdlib.BoundLogger,
)


def logger(**bound: Any) -> Any:
    """A bound logger, looked up anew each time: the host may configure structlog at any time."""
    base = structlog.get_logger("enginepool") if structlog.is_configured() else _fallback
    return base.bind(**bound)
