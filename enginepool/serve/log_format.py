"""The format of the server's log lines: for people on a terminal, JSON elsewhere.

The standard `logging` (of upstream, uvicorn and JAX) and Python's warnings have it too.
"""

from __future__ import annotations

import logging
from typing import Any, TextIO, cast

import structlog

from enginepool.serve.log import LogLines

_OF_SEVERAL_LINES = ("exception", "stack")


def log_to(lines: LogLines, *, terminal: bool, upstream_level: str | None = None) -> None:
    """Configure structlog and `logging` of this process.

    Args:
        upstream_level: The level from which upstream logs; by default warnings.
    """
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        *([_printable] if terminal else []),
    ]
    renderer: Any = (
        # Tracebacks are plain text, without the values of local variables: one may be a prompt.
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if terminal
        else structlog.processors.JSONRenderer(default=str)
    )
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, lines)),
    )
    handler = logging.StreamHandler(cast(TextIO, lines))
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.getLogger().addHandler(handler)
    logging.captureWarnings(True)
    if upstream_level is not None:
        logging.getLogger("sgl_jax").setLevel(upstream_level.upper())


def _printable(_: Any, __: str, event: dict[str, Any]) -> dict[str, Any]:
    """Escape what does not print: a terminal obeys control characters, which a client may have
    sent."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            lines = value.split("\n") if name in _OF_SEVERAL_LINES else [value]
            event[name] = "\n".join(map(_escaped, lines))
    return event


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
