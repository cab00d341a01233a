"""Jobs that other threads give an engine, without an engine."""

from typing import Any

import pytest

from enginepool.engine.jobs import EngineBroken, EngineStopped, Jobs, StopEngine, stop_engine


@pytest.fixture
def jobs() -> Jobs:
    return Jobs(lambda: None)


def never() -> bool:
    return False


def test_a_job_waits_for_its_condition(jobs: Jobs) -> None:
    """It runs at the first step boundary at which the condition holds, once."""
    ready: list[int] = []
    future = jobs.add_when(lambda: bool(ready), lambda: "done")
    jobs.run_due()
    assert not future.done()
    assert not jobs.due()
    ready.append(1)
    assert jobs.due()
    jobs.run_due()
    assert future.result(0) == "done"
    assert not jobs.due()


@pytest.mark.parametrize("seen", [False, True])
def test_jobs_fail_when_the_engine_stops(jobs: Jobs, seen: bool) -> None:
    """Whether the engine has seen them or not. Later jobs fail at once."""
    futures: list[Any] = [jobs.add_when(never, lambda: None)]
    if seen:
        jobs.run_due()
    futures.append(jobs.add(lambda: None))
    jobs.close("it has ended")
    futures += [jobs.add(lambda: None), jobs.add_when(never, lambda: None)]
    for future in futures:
        with pytest.raises(EngineStopped, match="it has ended"):
            future.result(0)


def test_the_engine_is_closed_while_it_looks_for_a_job(jobs: Jobs) -> None:
    """By another thread, as a stuck engine is. The job whose condition holds fails like the others,
    and the engine goes on to the job that ends it."""

    def closing() -> bool:
        jobs.close("it has ended", last=stop_engine)
        return True

    future = jobs.add_when(closing, lambda: pytest.fail("it ran"))
    with pytest.raises(StopEngine):
        jobs.run_due()
    with pytest.raises(EngineStopped, match="it has ended"):
        future.result(0)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_job_that_breaks_the_engine(jobs: Jobs, goes_on: bool) -> None:
    """Its caller is told when the engine has left its loop, or is back in it."""

    def job() -> None:
        raise EngineBroken("no memory")

    future = jobs.add(job)
    with pytest.raises(EngineBroken):
        jobs.run_due()
    assert not future.done()
    if goes_on:
        assert jobs.due()
        jobs.run_due()
    else:
        jobs.close("it has ended")
    with pytest.raises(EngineBroken, match="no memory"):
        future.result(0)
    assert not jobs.due()
