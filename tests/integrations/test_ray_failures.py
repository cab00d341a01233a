"""Hosts that hang, that a prompt kills, that do not come back; a driver that dies."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ray = pytest.importorskip("ray")

from enginepool import EnginePool, PoolFailed  # noqa: E402
from enginepool.ray import RayEnginePool  # noqa: E402
from tests.support.liveness import SECONDS, callers, until  # noqa: E402
from tests.support.pools import SMALL, same  # noqa: E402
from tests.support.ray_nodes import two_nodes  # noqa: E402

PROMPTS = [[3 + i % 50, 40 + i % 7, 7] for i in range(30)]
PARAMS = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 100}
OPTIONS: dict[str, Any] = {"devices_per_host": 1, "warmup": "none", **SMALL}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of two nodes that have room for two pools at a time."""
    with two_nodes(cpus=2) as where:
        yield where


@pytest.fixture(scope="module")
def hosts(address: str) -> Iterator[RayEnginePool]:
    with RayEnginePool(hosts=2, hang_timeout=20.0, **OPTIONS) as pool:
        yield pool


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Any]]:
    with EnginePool(devices=1, warmup="none", **SMALL) as pool:
        return run(pool)


def run(pool: Any, count: int = len(PROMPTS)) -> list[dict[str, Any]]:
    ids = PROMPTS[:count]
    return pool.generate_all(input_ids=ids, sampling_params=PARAMS, return_logprob=True)


def pids(pool: RayEnginePool) -> list[int]:
    until(lambda: [h["state"] for h in pool.stats()["hosts"]] == ["serving"] * 2)
    return [host["pid"] for host in pool.stats()["hosts"]]


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_host_hangs(hosts: RayEnginePool, expected: list[dict[str, Any]]) -> None:
    """Its process is ended, its prompts move, and it comes back."""
    run(hosts)  # compiled
    stopped, other = pids(hosts)
    with callers(1) as executor:
        call = executor.submit(run, hosts)
        until(lambda: hosts.fleet.hosts[0].running)
        os.kill(stopped, signal.SIGSTOP)
        results = call.result(SECONDS)
    same(results, expected)
    until(lambda: has_ended(stopped))
    again = pids(hosts)
    assert again[0] != stopped
    assert again[1] == other
    same(run(hosts), expected)


def test_a_prompt_takes_two_hosts_down(
    hosts: RayEnginePool, expected: list[dict[str, Any]]
) -> None:
    """Only this prompt was on both hosts without getting a token. Only this prompt ends."""
    before = pids(hosts)
    links = hosts.fleet.hosts
    count = 5  # as many as one host may have outstanding, so each has room for the other's
    expected = expected[:count]
    hosts.pause_generation()
    with callers(1) as executor:
        call = executor.submit(run, hosts, count)
        until(lambda: all(link.running for link in links))
        culprit = min(links[0].running.values(), key=lambda output: output.position)
        os.kill(before[0], signal.SIGKILL)
        until(lambda: culprit in links[1].running.values())
        os.kill(before[1], signal.SIGKILL)
        until(lambda: culprit.done)
        pids(hosts)
        hosts.continue_generation()
        results = call.result(SECONDS)
    place = culprit.position
    ended = results[place]["meta_info"]
    assert ended["finish_reason"]["err_type"] == "poisoned"
    assert "hosts 0 and 1" in ended["finish_reason"]["message"]
    same(results[:place] + results[place + 1 :], expected[:place] + expected[place + 1 :])


def test_no_host_is_left(address: str, expected: list[dict[str, Any]]) -> None:
    """Waiting callers get an error that has the tokens so far. Later callers get an error, too."""
    with RayEnginePool(hosts=2, max_restarts=0, **OPTIONS) as pool, callers(1) as executor:
        call = executor.submit(run, pool)
        links = pool.fleet.hosts
        until(lambda: any(output.done for output in _outputs(pool)))
        for pid in pids(pool):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(PoolFailed, match=r"host 0: failed .*host 1: failed") as caught:
            call.result(SECONDS)
        with pytest.raises(PoolFailed):
            run(pool)
    assert [link.state for link in links] == ["failed"] * 2
    assert len(caught.value.results) == len(PROMPTS)
    for index, result in enumerate(caught.value.results):
        ids = result["output_ids"]
        assert ids == expected[index]["output_ids"][: len(ids)]
    kinds = [r["meta_info"]["finish_reason"]["type"] for r in caught.value.results]
    assert set(kinds) == {"length", "abort"}


def _outputs(pool: RayEnginePool) -> list[Any]:
    return [output for call in list(pool.fleet.router.calls) for output in call.outputs]


def test_the_driver_dies(address: str) -> None:
    command = [sys.executable, "-m", "tests.support.ray_driver", address]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], text=True
    ) as driver:
        try:
            assert driver.stdout is not None
            actors = json.loads(driver.stdout.readline())
            assert len(actors) == 2
            assert not any(map(has_ended, actors))
        finally:
            driver.kill()
    until(lambda: all(map(has_ended, actors)))


def test_ray_is_shut_down(address: str) -> None:
    """Calls that wait end, and the pool closes. This test is the last one, because nothing can use
    Ray afterwards."""
    pool = RayEnginePool(hosts=1, hang_timeout=20.0, **OPTIONS).open()
    try:
        with callers(1) as executor:
            pool.pause_generation()
            call = executor.submit(run, pool, 1)
            until(lambda: pool.fleet.hosts[0].running)
            ray.shutdown()
            with pytest.raises(PoolFailed, match="host 0: failed"):
                call.result(SECONDS)
    finally:
        pool.close()
    assert not ray.is_initialized()  # nothing has started another cluster
