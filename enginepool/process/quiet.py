"""What other libraries print through `logging` is kept back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_generation_warnings() -> Iterator[None]:
    """transformers prints, whatever the host's logging is, what it thinks of a checkpoint's
    generation_config.json whenever that is read; not on this thread."""
    thread = threading.get_ident()

    def elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger = logging.getLogger("transformers.generation.configuration_utils")
    logger.addFilter(elsewhere)
    try:
        yield
    finally:
        logger.removeFilter(elsewhere)


@contextmanager
def quiet_logger(name: str) -> Iterator[None]:
    """Keep a library's warnings from being printed where the host has not configured logging.

    Python prints what no handler takes. Handlers that the host has, or adds, get everything.
    """
    handler = logging.NullHandler()
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
