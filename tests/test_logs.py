"""An error of the host's logging ends nothing."""

import logging
from typing import Any, NoReturn

import pytest
import structlog

from enginepool.logs import logger


def test_a_host_whose_log_fails(caplog: pytest.LogCaptureFixture) -> None:
    """Its structlog writes to a closed stream. The standard logger reports it."""
    with open("/dev/null", "w") as stream:
        factory = structlog.WriteLoggerFactory(file=stream)
    before = structlog.get_config()
    structlog.configure(logger_factory=factory, cache_logger_on_first_use=False)
    try:
        with caplog.at_level(logging.WARNING, logger="enginepool"):
            logger().info("enginepool.opened", engines=2)
    finally:
        structlog.configure(**before)
        structlog.reset_defaults()
    assert "enginepool.event_not_logged: enginepool.opened" in caplog.text
    assert "closed file" in caplog.text


def test_a_host_whose_log_cannot_be_made(caplog: pytest.LogCaptureFixture) -> None:
    """Its logger factory fails at every event."""

    def factory(*_: Any) -> NoReturn:
        raise OSError("no log server")

    before = structlog.get_config()
    structlog.configure(logger_factory=factory, cache_logger_on_first_use=False)
    try:
        with caplog.at_level(logging.WARNING, logger="enginepool"):
            logger().info("enginepool.opened", engines=2)
    finally:
        structlog.configure(**before)
        structlog.reset_defaults()
    assert "enginepool.event_not_logged: enginepool.opened: OSError" in caplog.text
