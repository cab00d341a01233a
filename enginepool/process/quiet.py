"""Keeps other libraries from printing through `logging`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_generation_warnings() -> Iterator[None]:
    """Silence transformers' warnings about a generation_config.json, on this thread.

    It prints them each time one is read, however the host has configured logging.
    """
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
    """Keep a library's warnings from being printed by a host that has not configured logging.

    Python prints warnings for which there is no handler. The host's own handlers, present or later,
    get everything.
    """
    handler = logging.NullHandler()
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
