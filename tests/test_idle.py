"""An open pool that has nothing to do costs nothing, paused or not."""

import statistics
import time

import pytest
from liveness import at_rest, paused, until

from enginepool import EnginePool

PARAMS = {"temperature": 0.0, "max_new_tokens": 200, "ignore_eos": True}


def idle_share() -> float:
    """CPU time of the whole process over wall time: the median of three windows after a rest."""
    time.sleep(2.0)
    shares = []
    for _ in range(3):
        wall, cpu = time.perf_counter(), time.process_time()
        time.sleep(1.0)
        shares.append((time.process_time() - cpu) / (time.perf_counter() - wall))
    return statistics.median(shares)


@pytest.mark.parametrize("mode", [None, "in_place", "retract"])
def test_idle_is_free(pool: EnginePool, mode: str | None) -> None:
    """Four engines take less than 1 % of one core: open and at rest, and paused with requests that
    run and requests that wait."""
    pool.generate_all(input_ids=[[65, 66]] * 8, sampling_params={"max_new_tokens": 2})
    until(lambda: at_rest(pool))
    if mode is None:
        assert idle_share() < 0.01
        return
    stream = pool.stream(input_ids=[[65, 66 + i] for i in range(20)], sampling_params=PARAMS)
    next(stream)
    with paused(pool, mode):
        assert pool.stats()["running"] == (16 if mode == "in_place" else 0)
        assert idle_share() < 0.01
    assert sum("length" in str(c["meta_info"]["finish_reason"]) for c in stream) == 20
