"""An open pool that has nothing to do costs nothing, paused or not."""

import pytest

from tests.support.programs import Program


@pytest.mark.slow
def test_idle_is_free() -> None:
    """Four engines take less than 1 % of one core: open and at rest, and paused with
    requests that run and requests that wait. In a process that has nothing else alive."""
    report, printed = Program("idle", warmup="none").report()
    assert (report.pop("in_place, running"), report.pop("retract, running")) == (16, 0)
    assert report.keys() == {"at rest", "in_place", "retract"}
    assert max(report.values()) < 0.01
    assert printed == ""
