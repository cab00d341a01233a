"""Faults put into the engines of a pool at random, under load and with swaps of weights in every
mode, and what it survived.

    python -m benchmarks.soak --minutes 10 --seed 1

Every prompt must be answered once, with the tokens that its weight versions give (held against a
plain JAX forward pass); no output may mix versions but in the modes that allow it; at the end
every engine serves with the same weights, holds nothing, and memory, threads, signal handlers and
child processes are as at the start. Exits with 1 if not. The limit of restarts is raised.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import jax
import psutil

from benchmarks import faults
from benchmarks.span_checks import Finished, check_spans, check_tokens
from benchmarks.swap_soak import _server_args
from benchmarks.synthetic import micro_config, write_model
from benchmarks.table import plain
from enginepool import EnginePool, EnginePoolError, WeightUpdateFailed

_STEP_TIMEOUT = 2.0
_SWAP_EVERY = 2.0  # seconds
_MIXING = ("retract", "in_place")  # modes whose outputs may have several versions
_END_SECONDS = 120.0
_MODES = ("drain", "retract", "abort", "in_place")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--minutes", type=float, default=10.0)
    add("--seed", type=int, default=0)
    add("--engines", type=int, default=4)
    add("--requests", type=int, default=32, help="in flight; default: 32")
    add("--faults-per-minute", type=float, default=15.0)
    add("--json", metavar="FILE", help="write all figures there")
    return parser.parse_args(argv)


class Injector:
    """Puts one random fault after the other into random engines."""

    def __init__(self, pool: EnginePool, rng: random.Random) -> None:
        self._pool, self._random = pool, rng
        self.counts: collections.Counter[str] = collections.Counter()
        self._kinds: dict[str, Callable[[int], Any]] = {
            "step raises": lambda i: faults.raise_in_step(pool, i, self._at()),
            "step raises SystemExit": lambda i: faults.raise_in_step(pool, i, 1, SystemExit(1)),
            "result lost": lambda i: faults.raise_after_step(pool, i, self._at()),
            "bookkeeping raises": lambda i: faults.raise_after_bookkeeping(pool, i, self._at()),
            "KV buffers deleted": lambda i: faults.delete_kv_cache(pool, i),
            "weight deleted": lambda i: faults.delete_leaf(pool, i),
            "weight not finite": lambda i: faults.spoil_leaf(pool, i),
            "commit raises": lambda i: faults.raise_in_commit(pool, i),
            "step hangs": self._hang,
        }

    def inject(self) -> None:
        serving = [
            e["engine_index"] for e in self._pool.stats()["engines"] if e["state"] == "serving"
        ]
        if not serving:
            return
        kind = self._random.choice(sorted(self._kinds))
        try:
            self._kinds[kind](self._random.choice(serving))
        except (KeyError, AttributeError, IndexError, RuntimeError):
            return  # the engine failed at this very moment
        self.counts[kind] += 1

    def _at(self) -> int:
        return self._random.randint(1, 12)

    def _hang(self, engine: int) -> None:
        let_go = faults.hang_in_step(self._pool, engine, self._at())
        threading.Timer(self._random.uniform(0.5, 3.0) * _STEP_TIMEOUT, let_go.set).start()


class Soak:
    """The load, the faults, the swaps, and the checks afterwards."""

    def __init__(self, pool: EnginePool, models: Sequence[Path], args: argparse.Namespace) -> None:
        self._pool, self._models, self._args = pool, models, args
        self._random = random.Random(args.seed)
        self._injector = Injector(pool, random.Random(f"faults {args.seed}"))
        self._running = True
        self._finished: list[tuple[Finished, int]] = []
        self._mode_of = {0: "drain"}  # by version
        self._refused = 0
        self.violations: list[str] = []

    async def run(self) -> None:
        try:
            async with anyio.create_task_group() as group:
                for _ in range(self._args.requests):
                    group.start_soon(self._keep_asking)
                group.start_soon(self._break)
                group.start_soon(self._swap)
                await anyio.sleep(60 * self._args.minutes)
                self._running = False
                group.cancel_scope.deadline = anyio.current_time() + _END_SECONDS
        finally:
            self._running = False
        if group.cancel_scope.cancelled_caught:
            self.violations.append(f"requests did not end within {_END_SECONDS:.0f} s")

    async def _keep_asking(self) -> None:
        while self._running:
            prompt = [self._random.randrange(256) for _ in range(self._random.randint(1, 40))]
            wanted = self._random.randint(8, 48)
            params = {"temperature": 0.0, "max_new_tokens": wanted, "ignore_eos": True}
            try:
                (result,) = await self._pool.async_generate_all(
                    input_ids=[prompt], sampling_params=params
                )
            except EnginePoolError as error:
                self.violations.append(f"a request raised {error!r}")
                return
            self._finished.append((Finished(prompt, result), wanted))

    async def _break(self) -> None:
        while self._running:
            await anyio.sleep(self._random.expovariate(self._args.faults_per_minute / 60))
            await anyio.to_thread.run_sync(self._injector.inject)

    async def _swap(self) -> None:
        number = 0
        while self._running:
            await anyio.sleep(_SWAP_EVERY)
            mode: Any = _MODES[self._random.randrange(len(_MODES))]
            self._mode_of[number + 1] = mode
            try:
                await self._pool.async_update_weights(
                    self._models[(number + 1) % len(self._models)],
                    weight_version=number + 1,
                    mode=mode,
                )
            except WeightUpdateFailed:
                self._refused += 1
            else:
                number += 1

    # Afterwards

    def check_outputs(self) -> dict[str, Any]:
        trusted = []
        for finished, wanted in self._finished:
            found = check_spans(finished) + self._check_end(finished, wanted)
            self.violations += found
            if not found:
                trusted.append(self._verifiable(finished))
        compared = check_tokens(trusted, self._models)
        self.violations += compared.violations
        return {
            "requests": len(self._finished),
            "tokens": sum(len(finished.output) for finished, _ in self._finished),
            "compared": compared.tokens,
            "ties": compared.ties,
            "swaps": len(self._mode_of) - 1,
            "refused swaps": self._refused,
            "faults": dict(self._injector.counts),
        }

    def _check_end(self, finished: Finished, wanted: int) -> list[str]:
        kind, length = finished.reason["type"], len(finished.output)
        versions = [version for *_, version in finished.spans]
        found = []
        if kind == "abort":
            if finished.reason["message"] != "update_weights(mode='abort')":
                found.append(f"{finished}: {finished.reason}")
        elif length != wanted:
            found.append(f"{finished}: {length} tokens of {wanted}, {finished.reason}")
        if len(versions) > 1:
            modes = {self._mode_of[v] for v in range(versions[0] + 1, versions[-1] + 1)}
            if not modes.issubset(_MIXING):
                found.append(f"{finished}: mixes versions over {modes}, {finished.spans}")
        return found

    def _verifiable(self, finished: Finished) -> Finished:
        """Up to where its KV cache was of other weights: after a swap in place."""
        spans = finished.spans
        keep = 1
        while keep < len(spans):
            passed = range(spans[keep - 1][2] + 1, spans[keep][2] + 1)
            if any(self._mode_of[version] == "in_place" for version in passed):
                break
            keep += 1
        meta = {**finished.result["meta_info"], "weight_versions": spans[:keep]}
        return Finished(finished.prompt, {**finished.result, "meta_info": meta})

    def check_pool(self) -> None:
        deadline = time.monotonic() + _END_SECONDS
        while not _at_rest(stats := self._pool.stats()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not _at_rest(stats):
            self.violations.append(f"afterwards: {stats['engines']}")
        try:
            self._pool.checksum()
        except EnginePoolError as error:
            self.violations.append(f"afterwards: {error}")


def _at_rest(stats: dict[str, Any]) -> bool:
    return not stats["waiting"] and all(
        engine["state"] == "serving" and not engine["running"] and not engine["kv_used_tokens"]
        for engine in stats["engines"]
    )


def _process() -> dict[str, Any]:
    """What a host would miss or find too much."""
    numbers = [n for n in signal.valid_signals() if n not in (signal.SIGKILL, signal.SIGSTOP)]
    return {
        "threads": sorted(
            t.name for t in threading.enumerate() if not t.name.startswith(("AnyIO", "Thread-"))
        ),
        "signal handlers": [repr(signal.getsignal(number)) for number in numbers],
        "children": [child.pid for child in psutil.Process().children(recursive=True)],
    }


def _device_bytes(pool: EnginePool) -> int:
    gc.collect()
    return pool.stats()["memory"]["sum"]["bytes_in_use"]


def _recoveries(events: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Seconds from a fault to serving again, by how."""
    down: dict[int, float] = {}
    seconds: dict[str, list[float]] = {"reset": [], "rebuild": []}
    for event in events:
        if event["event"] == "engine_quarantined":
            down.setdefault(event["engine"], event["time"])
        elif event["event"] == "engine_recovered" and event["engine"] in down:
            seconds[event["by"]].append(event["time"] - down.pop(event["engine"]))
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    slots = -(-args.requests // args.engines)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        models = [
            write_model(Path(folder, str(which)), micro_config(), seed=which, std=0.15)
            for which in range(2)
        ]
        options = {"max_restarts": 10**6, "step_timeout": _STEP_TIMEOUT, **_server_args(slots)}
        with EnginePool(str(models[0]), devices=args.engines, **options) as pool:
            pool.generate_all(input_ids=[[1]] * args.requests)
            pool.update_weights(models[0], weight_version=0)
            before, used = _process(), _device_bytes(pool)
            soak = Soak(pool, models, args)
            anyio.run(soak.run)
            soak.check_pool()
            after, used_after = _process(), _device_bytes(pool)
            report = soak.check_outputs()
            recoveries = _recoveries(pool.events())
    violations = soak.violations
    violations += [
        f"{key}: {before[key]} became {after[key]}" for key in before if before[key] != after[key]
    ]
    if abs(used_after - used) > 0.02 * used:
        violations.append(f"device memory: {used} bytes became {used_after}")
    report |= {
        "violations": len(violations),
        "device memory": used_after / used,
        **{
            f"median ms to serve again by {by}": 1000 * statistics.median(s)
            for by, s in recoveries.items()
            if s
        },
        **{f"by {by}": len(s) for by, s in recoveries.items()},
    }
    plain(["what", "how many"], [[key, _text(value)] for key, value in report.items()])
    print("\n".join(violations[:20]))
    if args.json:
        figures = {
            "jax": jax.__version__,
            "arguments": vars(args),
            **report,
            "violations": violations,
        }
        Path(args.json).write_text(json.dumps(figures, indent=2), encoding="utf-8")
    return 1 if violations else 0


def _text(value: Any) -> Any:
    if isinstance(value, dict):
        return f"{sum(value.values())}: " + ", ".join(f"{n} {k}" for k, n in sorted(value.items()))
    return f"{value:.3f}" if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
