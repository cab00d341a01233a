"""An error of the host's logging ends nothing."""

import logging
from typing import Any, NoReturn

import pytest
import structlog

from enginepool.logs import logger


def closed_stream() -> Any:
    with open("/dev/null", "w") as stream:
        return structlog.WriteLoggerFactory(file=stream)


def no_server(*_: Any) -> NoReturn:
    raise OSError("no log server")


@pytest.mark.parametrize(
    ("factory", "why"), [(closed_stream(), "closed file"), (no_server, "OSError")]
)
def test_a_host_whose_log_fails(caplog: pytest.LogCaptureFixture, factory: Any, why: str) -> None:
    """Its structlog writes to a closed stream, or makes no logger. The standard logger reports
    it."""
    before = structlog.get_config()
    structlog.configure(logger_factory=factory, cache_logger_on_first_use=False)
    try:
        with caplog.at_level(logging.WARNING, logger="enginepool"):
            logger().info("enginepool.opened", engines=2)
    finally:
        structlog.configure(**before)
        structlog.reset_defaults()
    assert "enginepool.event_not_logged: enginepool.opened" in caplog.text
    assert why in caplog.text
