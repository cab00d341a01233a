"""Random faults of hosts under load, with new weights every few seconds.

Killed actors, actors that are stopped for ten seconds, updates that do not fit, a kill between
stage and commit, restarts by Ray. No output may be lost or doubled, none may have a token of a
version older than the last commit that had returned when its call began, and at the end the
hosts' weights are equal and those of the last update.

Faults here fall on anyone: an output that is on a host alone as a suspect, and loses that one too
before its next token, ends as poisoned by the rule. A lost host can end one so, and no more.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.many_hosts.nodes import POOL, two_nodes
from enginepool import EnginePool, InvalidWeights, WeightUpdateFailed, toy

_MODES = ("drain", "retract", "in_place")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--update-every", type=float, default=3.0)
    parser.add_argument("--hang-timeout", type=float, default=8.0)
    parser.add_argument("--callers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)


class Run:
    """What goes on, and what was wrong with it.

    Attributes:
        committed: The version of the last update that had returned.
        wrong: In words; empty is good.
    """

    def __init__(self, pool: Any, given: argparse.Namespace) -> None:
        self.pool = pool
        self.given = given
        self.committed = 0
        self.wrong: list[str] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self._ended = threading.Event()
        self._kill_before_commit = threading.Event()
        self._paths = [str(toy.checkpoint()), str(toy.checkpoint("subtract"))]
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=work.__name__)
            for work in [self._update] + [self._load] * given.callers
        ]

    def __enter__(self) -> Run:
        self._hook_commit()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.wrong.append(f"{work.__name__}: {type(error).__name__}: {error}")

    # Load

    def _load(self) -> None:
        rng = random.Random(threading.get_ident())
        while not self._ended.is_set():
            count, n = rng.randint(1, 24), rng.choice([1, 1, 2])
            prompts = [rng.choices(range(256), k=rng.randint(1, 60)) for _ in range(count)]
            params = [
                {"max_new_tokens": rng.randint(1, 60), "ignore_eos": True, "n": n}
                for _ in range(count)
            ]
            floor = self.committed
            options = {"input_ids": prompts, "sampling_params": params}
            if rng.random() < 0.5:
                results = self.pool.generate_all(**options)
            else:
                results = list(self.pool.as_completed(**options))
            self._look(results, params, n, floor)

    def _look(self, results: Any, params: list[dict[str, Any]], n: int, floor: int) -> None:
        self.counts["outputs"] += len(results)
        metas = [result["meta_info"] for result in results]
        found = sorted((meta["prompt_index"], meta["sample_index"]) for meta in metas)
        if found != [(index, sample) for index in range(len(params)) for sample in range(n)]:
            self.wrong.append(f"{len(params)} prompts of {n} samples gave {found}")
        for result, meta in zip(results, metas, strict=True):
            wanted = params[meta["prompt_index"]]["max_new_tokens"]
            if meta["finish_reason"].get("err_type") == "poisoned":
                self.counts["outputs poisoned"] += 1
            elif meta["finish_reason"]["type"] != "length" or len(result["output_ids"]) != wanted:
                self.wrong.append(f"{len(result['output_ids'])} of {wanted}: {meta}")
            versions = [version for *_, version in meta["weight_versions"]]
            if min(versions, default=floor) < floor:
                self.wrong.append(f"versions {versions} after {floor} was committed")

    # Weights

    def _update(self) -> None:
        version = 0
        rng = random.Random(self.given.seed + 1)
        while not self._ended.wait(self.given.update_every):
            version += 1
            source: Any = self._paths[version % 2]
            if rng.random() < 0.3:
                source = _arrays(source)
            try:
                self.pool.update_weights(source, weight_version=version, mode=rng.choice(_MODES))
            except WeightUpdateFailed as error:  # every host was away
                self.counts["updates that came to nothing"] += 1
                print("update", version, error, flush=True)
                version -= 1
                continue
            self.committed = version
            self.counts["updates"] += 1

    def _hook_commit(self) -> None:
        from enginepool.ray import update as updating

        commit = updating._commit

        async def killed_first(fleet: Any, number: int, mode: str, hosts: Any) -> Any:
            if self._kill_before_commit.is_set():
                self._kill_before_commit.clear()
                _signal(random.choice(hosts).pid, signal.SIGKILL)
            return await commit(fleet, number, mode, hosts)

        updating._commit = killed_first

    # Faults

    def fault(self, rng: random.Random) -> str:
        """One more, when there is a host to hurt; which."""
        deadline = time.monotonic() + 60.0
        while not (hosts := self.pool.fleet.serving()):
            if time.monotonic() > deadline:
                return "nobody to hurt"
            time.sleep(0.1)
        host = rng.choice(hosts)
        kinds: dict[str, Callable[[], Any]] = {
            "kill -9": lambda: _signal(host.pid, signal.SIGKILL),
            "stopped for 10 s": lambda: self._stop(host.pid),
            "a source that does not fit": self._refused,
            "killed between stage and commit": self._kill_before_commit.set,
            "restarted": lambda: _restart(host.actor),
        }
        kind = rng.choice(sorted(kinds))
        kinds[kind]()
        self.counts[kind] += 1
        return f"{kind}: host {host.index}"

    def _stop(self, pid: int) -> None:
        _signal(pid, signal.SIGSTOP)
        timer = threading.Timer(10.0, _signal, (pid, signal.SIGCONT))
        timer.daemon = True
        timer.start()

    def _refused(self) -> None:
        import numpy as np

        try:
            self.pool.update_weights({"model.norm.weight": np.zeros(4, np.float32)})
        except (InvalidWeights, WeightUpdateFailed):
            return
        self.wrong.append("an update of one misshapen tensor was not refused")


def run(given: argparse.Namespace) -> bool:
    from enginepool.ray import RayEnginePool

    options: dict[str, Any] = {"devices_per_host": 2, "hang_timeout": given.hang_timeout, **POOL}
    rng = random.Random(given.seed)
    with two_nodes(), RayEnginePool(hosts=2, **options) as pool:
        started = time.monotonic()
        times = sorted(rng.uniform(0, given.seconds) for _ in range(given.faults))
        with Run(pool, given) as running:
            for at in times:
                time.sleep(max(0.0, started + at - time.monotonic()))
                what = running.fault(rng)
                print(f"{time.monotonic() - started:5.0f} s: {what}", flush=True)
            time.sleep(max(0.0, started + given.seconds - time.monotonic()))
        print("load has ended", flush=True)
        wrong = running.wrong + _at_the_end(pool, running.committed)
        restarts = [host["restarts"] for host in pool.stats()["hosts"]]
        if running.counts["outputs poisoned"] > sum(restarts):
            wrong.append(f"{running.counts['outputs poisoned']} poisoned, restarts {restarts}")
    for name, count in sorted(running.counts.items()):
        print(f"{count:6} {name}")
    print(f"restarts by host: {restarts}")
    for line in wrong[:20]:
        print("wrong:", line[:500])
    return not wrong


def _at_the_end(pool: Any, committed: int) -> list[str]:
    deadline = time.monotonic() + 120
    while any(host["state"] != "serving" for host in pool.stats()["hosts"]):
        if time.monotonic() > deadline:
            return [f"hosts are not back: {pool.stats()['hosts']}"]
        time.sleep(0.5)
    if pool.stats()["weight_version"] != committed:
        return [f"version {pool.stats()['weight_version']}, {committed} was committed"]
    found = pool.checksum()  # raises where hosts differ
    path = toy.checkpoint("subtract") if committed % 2 else toy.checkpoint()
    with EnginePool(str(path), devices=1, warmup="none", **POOL) as alone:
        expected = alone.checksum()
    return [] if found == expected else [f"checksum {found}, expected {expected}"]


def _arrays(path: str) -> dict[str, Any]:
    from benchmarks.synthetic import tensors

    return dict(tensors(Path(path)))


def _signal(pid: int | None, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if pid is not None:
            os.kill(pid, number)


def _restart(actor: Any) -> None:
    import ray  # pyright: ignore[reportMissingImports]

    ray.kill(actor, no_restart=False)
