"""Pools on two hosts under Ray: two nodes in this machine, two engines each, on the toy."""

import asyncio
import importlib
import math
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

ray = pytest.importorskip("ray")

from enginepool import (  # noqa: E402
    EnginePool,
    EnginePoolError,
    InvalidConfig,
    InvalidRequest,
    InvalidWeights,
    PoolClosed,
    toy,
)
from enginepool.ray import RayEnginePool  # noqa: E402
from enginepool.ray.fleet import Fleet  # noqa: E402
from enginepool.ray.link import HostLost  # noqa: E402
from enginepool.toy.files import read_checkpoint  # noqa: E402
from tests.support.adapters import (  # noqa: E402
    Arrays,
    config,
    merged,
    random_adapter,
    write_adapter,
)
from tests.support.liveness import SECONDS, callers, paused, until  # noqa: E402
from tests.support.pools import SMALL, same  # noqa: E402
from tests.support.ray_nodes import two_nodes  # noqa: E402

PROMPTS = [[3 + i % 50, 40 + i % 7, 7] * (1 + i % 3) for i in range(60)]
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 12}
LONG = GREEDY | {"max_new_tokens": 40}
LORA = {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": ["all"]}
SEEDED = {"temperature": 1.0, "sampling_seed": 7, "ignore_eos": True, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with two_nodes():
        yield


@pytest.fixture(scope="module")
def hosts(cluster: None) -> Iterator[RayEnginePool]:
    options: dict[str, Any] = {"warmup": "none", **LORA, **SMALL}
    with RayEnginePool(hosts=2, devices_per_host=2, hang_timeout=120.0, **options) as pool:
        yield pool


@pytest.fixture(scope="module")
def alone() -> Iterator[EnginePool]:
    """A pool in this process. The hosts' results are compared with it."""
    with EnginePool(devices=1, warmup="none", **SMALL) as pool:
        yield pool


@pytest.fixture
def fresh(hosts: RayEnginePool) -> Iterator[RayEnginePool]:
    """Both hosts, which get the toy's own weights back afterwards."""
    until(lambda: states(hosts) == ["serving"] * 2)
    yield hosts
    until(lambda: states(hosts) == ["serving"] * 2)
    hosts.update_weights(toy.checkpoint(), weight_version=0)


def states(pool: RayEnginePool) -> list[str]:
    return [host["state"] for host in pool.stats()["hosts"]]


def run(pool: Any, params: Any, prompts: Any = PROMPTS, **options: Any) -> list[dict[str, Any]]:
    return pool.generate_all(
        input_ids=prompts, sampling_params=params, return_logprob=True, **options
    )


@pytest.mark.parametrize("params", [GREEDY, SEEDED, SEEDED | {"n": 3}])
def test_results_are_those_of_one_pool(
    hosts: RayEnginePool, alone: EnginePool, params: dict[str, Any]
) -> None:
    expected = run(alone, params)
    results = run(hosts, params)
    same(results, expected)
    for result, other in zip(results, expected, strict=True):
        for name in ("prompt_index", "sample_index", "prompt_tokens", "completion_tokens"):
            assert result["meta_info"][name] == other["meta_info"][name]
    assert {result["meta_info"]["host_index"] for result in results} == {0, 1}
    masks = [
        [
            result["meta_info"]["output_sampling_mask"]
            for result in run(pool, params, PROMPTS[:4], return_sampling_mask=True)
        ]
        for pool in (hosts, alone)
    ]
    assert masks[0] == masks[1]
    part = [41, 7, 30]
    split = run(hosts, params, [PROMPTS[i] for i in part], prompt_indices=part)
    n = params.get("n", 1)
    same(split, [r for i in part for r in expected[i * n : (i + 1) * n]])


def test_other_ways_to_ask(hosts: RayEnginePool, alone: EnginePool) -> None:
    expected = run(alone, GREEDY)
    ended = list(hosts.as_completed(input_ids=PROMPTS, sampling_params=GREEDY))
    by_index = {r["meta_info"]["prompt_index"]: r["output_ids"] for r in ended}
    assert len(ended) == len(PROMPTS)
    assert by_index == {i: r["output_ids"] for i, r in enumerate(expected)}
    chunks = list(hosts.stream(input_ids=PROMPTS[:2], sampling_params=GREEDY))
    assert len(chunks) >= 2
    last = {chunk["index"]: chunk["output_ids"] for chunk in chunks}
    assert last == {i: expected[i]["output_ids"] for i in range(2)}
    assert hosts.generate_all([]) == []
    options: Any = {"return_prompt_logprob": True, "logprob_start_len": np.int64(1)}
    options["prompt_indices"] = np.array([7, 3])
    found, wanted = (run(pool, SEEDED, PROMPTS[:2], **options) for pool in (hosts, alone))
    same(found, wanted)
    for result, other in zip(found, wanted, strict=True):
        assert len(result["meta_info"]["input_token_logprobs"]) == len(
            other["meta_info"]["input_token_logprobs"]
        )

    async def main() -> None:
        results = await hosts.async_generate_all(
            input_ids=PROMPTS[:4], sampling_params=GREEDY, return_logprob=True
        )
        same(results, expected[:4])
        seen = [r async for r in hosts.async_as_completed(["1+1="], GREEDY)]
        assert len(seen) == 1

    anyio.run(main)


def test_bad_input_starts_nothing(hosts: RayEnginePool) -> None:
    before = hosts.stats()
    with pytest.raises(InvalidRequest, match="prompt 1: token id -1") as caught:
        run(hosts, GREEDY, [[5], [-1]])
    assert caught.value.prompt_index == 1
    with pytest.raises(InvalidRequest, match="top_logprobs_num=99"):
        run(hosts, GREEDY, top_logprobs_num=99)
    with pytest.raises(InvalidRequest, match="enable_return_routed_experts=True"):
        run(hosts, GREEDY, return_routed_experts=True)
    with pytest.raises(InvalidRequest, match="unknown"):
        run(hosts, GREEDY, temperature=0)
    for options in ({"logprob_start_len": 1}, {"logprob_start_len": 1, "return_logprob": True}):
        with pytest.raises(InvalidRequest, match="return_prompt_logprob=True"):
            hosts.stream("1+1=", **options)
    for params in ("greedy", [GREEDY, 5], SimpleNamespace(max_new_tokens=1)):
        with pytest.raises(InvalidRequest, match="sampling_params: expected a dict"):
            run(hosts, params, PROMPTS[:2])
    with pytest.raises(InvalidRequest, match="logprob_start_len=-1: expected an integer from 0"):
        hosts.stream("1+1=", return_prompt_logprob=True, logprob_start_len=-1)
    for timeout in ("5", -1, 0, True, math.nan):
        with pytest.raises(InvalidRequest, match=r"timeout=.* expected a finite number of seconds"):
            hosts.stream("1+1=", timeout=timeout)
    for indices in (5, [0], [0, -1], [0, "1"]):
        with pytest.raises(InvalidRequest, match="prompt_indices"):
            run(hosts, GREEDY, PROMPTS[:2], prompt_indices=indices)
    after = hosts.stats()
    assert [h["prompt_tokens"] for h in after["hosts"]] == [
        h["prompt_tokens"] for h in before["hosts"]
    ]


def test_what_cannot_hold(cluster: None) -> None:
    for name, bad in (
        ("hosts", (0, "1", True)),
        ("max_restarts", (-2, "1", 1.0)),
        ("hang_timeout", (0, 0.5, -1.0, "60", True, math.nan, math.inf)),
    ):
        for value in bad:
            with pytest.raises(InvalidConfig, match=f"{name}={value!r}: expected"):
                RayEnginePool(**{"hosts": 1, name: value})
    with pytest.raises(InvalidConfig, match="max_queued=5: outputs wait in the driver"):
        RayEnginePool(hosts=1, max_queued=5)
    with pytest.raises(InvalidConfig, match="no_such_argument"):
        RayEnginePool(hosts=1, no_such_argument=1)


@pytest.mark.parametrize("timeout", [0.2, np.float32(0.2)])
def test_a_time_limit(hosts: RayEnginePool, timeout: Any) -> None:
    results = run(hosts, GREEDY | {"max_new_tokens": 400}, timeout=timeout)
    reasons = [result["meta_info"]["finish_reason"] for result in results]
    assert {reason["type"] for reason in reasons} <= {"abort", "length"}
    assert any(reason.get("err_type") == "timeout" for reason in reasons)
    until(lambda: hosts.stats()["running"] == hosts.stats()["waiting"] == 0)
    assert len(run(hosts, GREEDY)) == len(PROMPTS)


def test_a_time_limit_before_the_first_token(hosts: RayEnginePool, alone: EnginePool) -> None:
    """The results have the fields of one pool's, whatever the call asked for."""
    options = {
        "top_logprobs_num": 2,
        "return_sampling_mask": True,
        "return_prompt_logprob": True,
        "timeout": 0.1,
    }
    metas = []
    for pool in (hosts, alone):
        with paused(pool):  # type: ignore[arg-type]
            (result,) = pool.generate_all(["1+1="], GREEDY, **options)
        metas.append(result["meta_info"])
        assert 0 < metas[-1]["e2e_latency"] < SECONDS
    for name in ("id", "weight_version", "e2e_latency", "sampling_seed"):
        assert type(metas[0].pop(name)) is type(metas[1].pop(name))
    assert metas[0].pop("host_index") is None
    assert metas[0] == metas[1]


@pytest.mark.parametrize("verb", ["as_completed", "stream"])
def test_an_iterator_that_is_closed(hosts: RayEnginePool, verb: str) -> None:
    """As in a pool: nothing starts before the first `next`, and closing ends the outputs."""
    options = {"input_ids": PROMPTS, "sampling_params": GREEDY | {"max_new_tokens": 400}}
    with paused(hosts):  # no output ends by itself
        iterator: Any = getattr(hosts, verb)(**options)
        hosts.stats()  # the driver has taken what came before
        assert not hosts.fleet.router.calls
        iterator.close()
    iterator = getattr(hosts, verb)(**options)
    next(iterator)
    assert hosts.fleet.router.calls
    iterator.close()
    until(lambda: not hosts.fleet.router.calls)
    until(lambda: not any(e["running"] for h in hosts.stats()["hosts"] for e in h["engines"]))


def test_a_task_that_is_cancelled_while_its_call_is_checked(
    hosts: RayEnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By asyncio itself, which does not wait for the thread. Nothing starts."""
    run_there, begun, go_on = Fleet.run, threading.Event(), threading.Event()
    checking: list[threading.Thread] = []

    def run_late(fleet: Fleet, coroutine: Any) -> Any:
        checking.append(threading.current_thread())
        begun.set()
        assert go_on.wait(SECONDS)
        return run_there(fleet, coroutine)

    async def main() -> None:
        task = asyncio.create_task(hosts.async_generate_all(input_ids=PROMPTS))
        await asyncio.to_thread(begun.wait, SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    with paused(hosts):
        with monkeypatch.context() as patch:
            patch.setattr(Fleet, "run", run_late)
            asyncio.run(main())
            checking[0].join(SECONDS)
        hosts.stats()
        assert not hosts.fleet.router.calls


@pytest.mark.parametrize("kind", ["path", "arrays", "iterator", "bfloat16"])
def test_new_weights(fresh: RayEnginePool, alone: EnginePool, kind: str) -> None:
    """Both hosts get them, from a path or through the object store."""
    import ml_dtypes

    new = toy.checkpoint("subtract")
    arrays = read_checkpoint(new)[1]
    source: Any = {"path": new, "arrays": arrays, "iterator": iter(arrays.items())}.get(kind)
    if kind == "bfloat16":
        source = {name: np.asarray(a).astype(ml_dtypes.bfloat16) for name, a in arrays.items()}
    report = fresh.update_weights(source, weight_version=kind)
    assert report.hosts.keys() == {0, 1}
    assert not report.missing
    results = run(fresh, GREEDY)
    assert {r["meta_info"]["weight_version"] for r in results} == {kind}
    if kind != "bfloat16":
        alone.update_weights(new)
        assert fresh.checksum() == alone.checksum()
        same(results, run(alone, GREEDY))
        alone.update_weights(toy.checkpoint())


def test_a_checksum_during_an_update(fresh: RayEnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits until all hosts have the update."""
    on_all, checking = Fleet.on_all, []

    async def one_first(fleet: Fleet, method: str, *args: Any, **options: Any) -> Any:
        if method != "commit":
            return await on_all(fleet, method, *args, **options)
        first, second = options["hosts"]
        said = await on_all(fleet, method, *args, hosts=[first])
        checking.append(executor.submit(fresh.checksum))
        while not (checking[0].done() or fleet.changing._waiters):  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
        return said | await on_all(fleet, method, *args, hosts=[second])

    monkeypatch.setattr(Fleet, "on_all", one_first)
    with callers(1) as executor:
        fresh.update_weights(toy.checkpoint("subtract"))
        assert checking[0].result(SECONDS) == fresh.checksum()


def test_one_source_that_does_not_fit(fresh: RayEnginePool) -> None:
    before = fresh.checksum()
    with pytest.raises(InvalidWeights, match="missing") as caught:
        fresh.update_weights({"model.norm.weight": np.zeros(4, np.float32)})
    assert caught.value.names
    for bad, what in (("x", "not str"), (np.ma.masked_less(np.ones(4), 2), "masked")):
        with pytest.raises(InvalidWeights, match=f"model.norm.weight: .*{what}"):
            fresh.update_weights({"model.norm.weight": bad}, strict=False)
    with pytest.raises(InvalidRequest, match="mode="):
        fresh.update_weights(toy.checkpoint(), mode="never")  # type: ignore[arg-type]
    assert fresh.checksum() == before
    assert fresh.stats()["weight_version"] == 0


def test_a_host_is_killed(fresh: RayEnginePool, alone: EnginePool) -> None:
    """Its prompts move with their tokens. It comes back with the current weights, from arrays in
    the object store, and never answers with older ones."""
    new = toy.checkpoint("subtract")
    fresh.update_weights(read_checkpoint(new)[1], weight_version="new")
    alone.update_weights(new)
    params = SEEDED | {"max_new_tokens": 120}
    expected = run(alone, params)
    alone.update_weights(toy.checkpoint())
    with callers(1) as executor:
        call = executor.submit(run, fresh, params)
        until(lambda: fresh.stats()["hosts"][0]["outstanding"] > 0)
        pid = fresh.stats()["hosts"][0]["pid"]
        os.kill(pid, signal.SIGKILL)
        results = call.result(SECONDS)
    same(results, expected)
    assert {r["meta_info"]["weight_version"] for r in results} == {"new"}
    until(lambda: states(fresh) == ["serving"] * 2)
    assert fresh.stats()["hosts"][0]["pid"] != pid
    assert fresh.checksum()
    again = run(fresh, params)
    same(again, expected)
    assert {r["meta_info"]["weight_version"] for r in again} == {"new"}
    assert {r["meta_info"]["host_index"] for r in again} == {0, 1}


def test_a_host_dies_between_stage_and_commit(
    fresh: RayEnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other host commits. The dead one takes no prompts until it has the update."""
    from enginepool.ray import update as updating

    commit = updating._commit
    pid = fresh.stats()["hosts"][1]["pid"]

    async def killed_first(*args: Any) -> Any:
        os.kill(pid, signal.SIGKILL)
        return await commit(*args)

    monkeypatch.setattr(updating, "_commit", killed_first)
    report = fresh.update_weights(toy.checkpoint("subtract"), weight_version="late")
    assert report.hosts.keys() == {0}
    assert report.missing.keys() == {1}
    for _ in range(3):
        versions = {r["meta_info"]["weight_version"] for r in run(fresh, GREEDY)}
        assert versions == {"late"}
    until(lambda: states(fresh) == ["serving"] * 2)
    assert fresh.checksum()
    assert {r["meta_info"]["host_index"] for r in run(fresh, GREEDY)} == {0, 1}


@pytest.fixture
def adapted(
    fresh: RayEnginePool, alone: EnginePool, tmp_path: Path
) -> Iterator[tuple[RayEnginePool, list[Arrays], list[list[dict[str, Any]]]]]:
    """Hosts without adapters, two adapters, and the outputs of the weights that they make."""
    arrays = [random_adapter(toy.checkpoint(), seed) for seed in range(2)]
    expected = []
    for index, one in enumerate(arrays):
        alone.update_weights(merged(tmp_path / str(index), toy.checkpoint(), one, 2.0))
        expected.append(run(alone, LONG))
    alone.update_weights(toy.checkpoint())
    yield fresh, arrays, expected
    for name in fresh.stats()["lora_adapters"]:
        fresh.unload_lora_adapter(name)
    until(lambda: not any(host["lora_adapters"] for host in fresh.stats()["hosts"]))


def test_adapters(adapted: Any, alone: EnginePool, tmp_path: Path) -> None:
    """Both hosts get them, from a folder that each reads or through the object store. They run
    beside the base, get a new version, and are unloaded while calls need them."""
    hosts, arrays, expected = adapted
    folder = write_adapter(tmp_path / "adapter", arrays[0], config(4))
    report = hosts.load_lora_adapter("x", folder, weight_version="one")
    assert report.hosts.keys() == {0, 1}
    names = [("x", None)[i % 2] for i in range(len(PROMPTS))]
    results = run(hosts, LONG, lora_path=names)
    same(results[::2], expected[0][::2])
    same(results[1::2], run(alone, LONG)[1::2])
    assert results[0]["meta_info"]["lora_versions"] == [[0, 40, "one"]]
    assert "lora_path" not in results[1]["meta_info"]
    assert {r["meta_info"]["host_index"] for r in results[::2]} == {0, 1}
    hosts.load_lora_adapter("x", arrays[1], config_dict=config(4), weight_version="two")
    assert hosts.stats()["lora_adapters"] == {"x": {"weight_version": "two"}}
    with callers(1) as executor:
        hosts.pause_generation()
        call = executor.submit(run, hosts, LONG, lora_path="x")
        until(lambda: hosts.stats()["waiting"] > 0)
        hosts.unload_lora_adapter("x")
        with pytest.raises(InvalidRequest, match="no such adapter; loaded: none"):
            run(hosts, GREEDY, lora_path="x")
        with pytest.raises(InvalidRequest, match="outputs still need the adapter of this name"):
            hosts.load_lora_adapter("x", folder)
        hosts.continue_generation()
        same(call.result(SECONDS), expected[1])
    until(lambda: not any(host["lora_adapters"] for host in hosts.stats()["hosts"]))
    assert hosts.stats()["weight_version"] == 0


def test_an_iterator_whose_adapter_is_unloaded_before_it_starts(adapted: Any) -> None:
    """It does not run under the next adapter of that name."""
    hosts, arrays, _ = adapted
    hosts.load_lora_adapter("x", arrays[0], config_dict=config(4))
    iterators = [hosts.stream("1+1=", GREEDY, lora_path="x") for _ in range(2)]
    hosts.unload_lora_adapter("x")
    with pytest.raises(InvalidRequest, match="lora_path='x': unloaded since the call was made"):
        list(iterators[0])
    hosts.load_lora_adapter("x", arrays[1], config_dict=config(4))
    with pytest.raises(InvalidRequest, match="lora_path='x': unloaded since the call was made"):
        list(iterators[1])


def test_an_adapter_that_does_not_fit(adapted: Any) -> None:
    """No host loads it. The earlier version stays."""
    hosts, arrays, expected = adapted
    wide = random_adapter(toy.checkpoint(), 5, rank=5)
    hosts.load_lora_adapter("x", arrays[0], config_dict=config(4), weight_version=1)
    with pytest.raises(InvalidWeights, match="rank 5 is more"):
        hosts.load_lora_adapter("x", wide, config_dict=config(5), weight_version=2)
    with pytest.raises(InvalidWeights, match="config_dict"):
        hosts.load_lora_adapter("y", arrays[0])
    for name in (None, "", 7):
        with pytest.raises(InvalidRequest, match="lora_name"):
            hosts.load_lora_adapter(name, arrays[0], config_dict=config(4))
    results = run(hosts, LONG, lora_path="x")
    same(results, expected[0])
    assert {tuple(r["meta_info"]["lora_versions"][0]) for r in results} == {(0, 40, 1)}


def test_a_host_that_comes_back_has_the_adapters(adapted: Any) -> None:
    """Its outputs move with their adapters. Before it serves, it loads the newest version of
    each adapter, and none that was unloaded."""
    hosts, arrays, expected = adapted
    fields = {"config_dict": config(4)}
    for version, index in ((1, 1), (2, 0)):
        hosts.load_lora_adapter("x", arrays[index], weight_version=version, **fields)
    hosts.load_lora_adapter("y", arrays[1], weight_version=3, **fields)
    hosts.load_lora_adapter("z", arrays[1], weight_version=4, **fields)
    hosts.unload_lora_adapter("z")
    names = ["xy"[i % 2] for i in range(len(PROMPTS))]
    with callers(1) as executor:
        call = executor.submit(run, hosts, LONG, lora_path=names)
        until(lambda: hosts.stats()["hosts"][0]["outstanding"] > 0)
        os.kill(hosts.stats()["hosts"][0]["pid"], signal.SIGKILL)
        results = [call.result(SECONDS)]
    until(lambda: states(hosts) == ["serving"] * 2)
    assert [sorted(host["lora_adapters"]) for host in hosts.stats()["hosts"]] == [["x", "y"]] * 2
    results.append(run(hosts, LONG, lora_path=names))
    for each in results:
        same(each[::2], expected[0][::2])
        same(each[1::2], expected[1][1::2])
    assert {r["meta_info"]["host_index"] for r in results[1]} == {0, 1}


def test_a_host_that_comes_back_has_adapters_that_earlier_calls_need(adapted: Any) -> None:
    """They were unloaded meanwhile. All hosts forget them when these calls have ended."""
    hosts, arrays, expected = adapted
    hosts.load_lora_adapter("x", arrays[0], config_dict=config(4))
    with callers(1) as executor:
        with paused(hosts):
            call = executor.submit(run, hosts, LONG, lora_path="x")
            until(lambda: hosts.stats()["waiting"] > 0)
            hosts.unload_lora_adapter("x")
            os.kill(hosts.stats()["hosts"][0]["pid"], signal.SIGKILL)
            until(lambda: states(hosts) != ["serving"] * 2)
            until(lambda: states(hosts) == ["serving"] * 2)
        results = call.result(SECONDS)
    same(results, expected[0])
    assert {result["meta_info"]["host_index"] for result in results} == {0, 1}
    until(lambda: not any(host["lora_adapters"] for host in hosts.stats()["hosts"]))


def test_pause(hosts: RayEnginePool) -> None:
    """A refused pause pauses no host, also none that starts again."""
    with pytest.raises(InvalidRequest, match="mode="):
        hosts.pause_generation("never")
    assert not hosts.fleet.paused
    hosts.pause_generation()
    with callers(1) as executor:
        call = executor.submit(run, hosts, GREEDY)
        until(lambda: hosts.stats()["running"] > 0)
        assert not call.done()
        hosts.continue_generation()
        assert len(call.result(SECONDS)) == len(PROMPTS)


def test_a_host_misses_the_end_of_a_pause(
    fresh: RayEnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver cannot reach it for a while. Its process and its pool stay as they are."""
    link, back = fresh.fleet.hosts[0], threading.Event()
    ask = link.ask

    async def cut(method: str, *args: Any, **options: Any) -> Any:
        if not back.is_set():
            raise HostLost("the network is cut", returns=True)
        return await ask(method, *args, **options)

    with paused(fresh):  # type: ignore[arg-type]
        monkeypatch.setattr(link, "ask", cut)
        until(lambda: link.state != "serving")
    back.set()
    until(lambda: states(fresh) == ["serving"] * 2)
    results = run(fresh, GREEDY, timeout=SECONDS)
    assert {r["meta_info"]["finish_reason"]["type"] for r in results} == {"length"}
    assert {r["meta_info"]["host_index"] for r in results} == {0, 1}


def test_a_pause_that_aborts(hosts: RayEnginePool) -> None:
    """It also ends the outputs that wait in the driver."""
    with callers(1) as executor, paused(hosts):  # type: ignore[arg-type]
        call = executor.submit(run, hosts, GREEDY)
        until(lambda: hosts.stats()["waiting"] > 0)
        hosts.pause_generation("abort")
        reasons = [r["meta_info"]["finish_reason"] for r in call.result(SECONDS)]
    abort = {
        "type": "abort",
        "message": "pause_generation(mode='abort')",
        "err_type": "cancelled",
    }
    assert reasons == [abort] * len(PROMPTS)


def test_more_tasks_than_threads(hosts: RayEnginePool) -> None:
    """All run at once, and steering is not kept waiting."""

    async def main() -> None:
        hosts.pause_generation()
        tasks = [asyncio.create_task(hosts.async_generate_all("1+1=", GREEDY)) for _ in range(50)]
        await asyncio.to_thread(until, lambda: len(hosts.fleet.router.calls) == len(tasks))
        await hosts.async_continue_generation()
        assert len(await asyncio.gather(*tasks)) == len(tasks)

    asyncio.run(main())


def test_arguments_that_a_host_cannot_read(
    hosts: RayEnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their module exists in the driver only."""
    (tmp_path / "driver_only.py").write_text("class Params(dict): pass\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    params = importlib.import_module("driver_only").Params(GREEDY)
    with pytest.raises(EnginePoolError, match="driver_only"):
        hosts.generate_all("1+1=", params)


def test_arguments_that_ray_refuses(cluster: None) -> None:
    """Nothing stays reserved."""

    def reserved() -> set[str]:
        groups = ray.util.placement_group_table().items()
        return {name for name, group in groups if group["state"] != "REMOVED"}

    before = reserved()
    pool = RayEnginePool(hosts=1, runtime_env={"env_vars": {"JAX_PLATFORMS": 1}}, **SMALL)
    with pytest.raises(TypeError, match="env_vars"):
        pool.open()
    until(lambda: reserved() == before)


def test_closing(cluster: None, hosts: RayEnginePool) -> None:
    """Waiting callers get an error, and no actor is left. This test is the last one, because it
    closes the hosts."""
    actors = [host.actor for host in hosts.fleet.hosts]
    hosts.pause_generation()
    with callers(1) as executor:
        call = executor.submit(run, hosts, GREEDY)
        until(lambda: hosts.stats()["running"] > 0)
        hosts.close()
        with pytest.raises(PoolClosed) as caught:
            call.result(SECONDS)
    assert len(caught.value.results) == len(PROMPTS)
    with pytest.raises(PoolClosed):
        run(hosts, GREEDY)
    for actor in actors:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actor.ping.remote())
