"""An open pool without work costs nothing, paused or not."""

import pytest

from tests.support.programs import Program


@pytest.mark.slow
def test_idle_is_free() -> None:
    """Four engines take less than 1 % of a core: idle, and paused with running and waiting
    requests. Nothing else runs in the process."""
    report, printed = Program("idle", warmup="none").report()
    assert (report.pop("in_place, running"), report.pop("retract, running")) == (16, 0)
    assert report.keys() == {"at rest", "in_place", "retract"}
    assert max(report.values()) < 0.01
    assert printed == ""
