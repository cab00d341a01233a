"""Faults put into the engines of a pool at random, under load and with swaps of weights in every
mode, and what it survived.

    python -m benchmarks.soak --minutes 10 --seed 1

Every prompt must be answered once: with the tokens that its weight versions give (held against a
plain JAX forward pass), also where a broken tokenizer leaves it without text. No output may mix
versions but in the modes that allow it. At the end every engine serves with the same weights and
holds nothing, and memory, threads, signal handlers and child processes are as at the start. Exits
with 1 if not. The limit of restarts is raised for this.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import jax

from benchmarks import faults
from benchmarks.injector import STEP_TIMEOUT, Injector
from benchmarks.micro_pool import OUTPUT, PROMPT, at_rest, server_args, two_models
from benchmarks.soak_checks import check_end, device_bytes, process, recoveries, verifiable
from benchmarks.span_checks import Finished, check_spans, check_tokens
from benchmarks.table import plain
from enginepool import EnginePool, EnginePoolError, WeightUpdateFailed

_SWAP_EVERY = 2.0  # seconds
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
    add("--faults-per-minute", type=float, default=20.0)
    add("--json", metavar="FILE", help="write all figures there")
    return parser.parse_args(argv)


class Soak:
    """The load, the faults and the swaps; what came of them."""

    def __init__(
        self,
        pool: EnginePool,
        models: Sequence[Path],
        args: argparse.Namespace,
        injector: Injector,
    ) -> None:
        self._pool, self._models, self._args, self._injector = pool, models, args, injector
        self._random = random.Random(args.seed)
        self._running = True
        self._finished: list[tuple[Finished, int, float]] = []  # with tokens wanted, when asked
        self._mode_of = {0: "drain"}  # by version
        self._swapped_at = {0: 0.0}
        self._refused = self._interrupted = 0
        self.violations: list[str] = []

    def run(self) -> None:
        """On the main thread, where Control-C arrives."""
        load = threading.Thread(target=anyio.run, args=[self._load], name="soak-load")
        load.start()
        while self._running:
            try:
                prompt, params, asked = self._question()
                results = self._pool.generate_all(input_ids=[prompt], sampling_params=params)
            except KeyboardInterrupt:
                self._interrupted += 1
            else:
                self._note(prompt, params, asked, results)
        load.join()

    async def _load(self) -> None:
        try:
            async with anyio.create_task_group() as group:
                for _ in range(self._args.requests):
                    group.start_soon(self._keep_asking)
                group.start_soon(self._swap)
                with anyio.move_on_after(60 * self._args.minutes):
                    await self._break()
                self._running = False
                group.cancel_scope.deadline = anyio.current_time() + _END_SECONDS
        finally:
            self._running = False
        if group.cancel_scope.cancelled_caught:
            self.violations.append(f"requests did not end within {_END_SECONDS:.0f} s")

    async def _keep_asking(self) -> None:
        while self._running:
            prompt, params, asked = self._question()
            try:
                results = await self._pool.async_generate_all(
                    input_ids=[prompt], sampling_params=params
                )
            except EnginePoolError as error:
                self.violations.append(f"a request raised {error!r}")
                return
            else:
                self._note(prompt, params, asked, results)

    def _question(self) -> tuple[list[int], dict[str, Any], float]:
        prompt = [self._random.randrange(256) for _ in range(self._random.randint(1, PROMPT))]
        wanted = self._random.randint(8, OUTPUT)
        params = {"temperature": 0.0, "max_new_tokens": wanted, "ignore_eos": True}
        return prompt, params, time.monotonic()

    def _note(
        self, prompt: list[int], params: dict[str, Any], asked: float, results: list[Any]
    ) -> None:
        if len(results) == 1:
            self._finished.append((Finished(prompt, results[0]), params["max_new_tokens"], asked))
        else:
            self.violations.append(f"one prompt, {len(results)} results")

    async def _break(self) -> None:
        while True:
            await anyio.sleep(self._random.expovariate(self._args.faults_per_minute / 60))
            await anyio.to_thread.run_sync(self._injector.inject)

    async def _swap(self) -> None:
        number = 0
        while self._running:
            await anyio.sleep(_SWAP_EVERY)
            mode: Any = self._random.choice(_MODES)
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
                self._swapped_at[number] = time.monotonic()

    # Afterwards

    def check_pool(self) -> None:
        deadline = time.monotonic() + _END_SECONDS
        while not at_rest(stats := self._pool.stats()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not at_rest(stats):
            self.violations.append(f"afterwards: {stats['engines']}")
        try:
            self._pool.checksum()
        except EnginePoolError as error:
            self.violations.append(f"afterwards: {error}")

    def check_outputs(self) -> dict[str, Any]:
        trusted = []
        for finished, wanted, asked in self._finished:
            found = check_spans(finished) + check_end(finished, wanted, self._mode_of)
            self.violations += found
            if not found and not self._prefilled_before(finished, asked):
                trusted.append(verifiable(finished, self._mode_of))
        compared = check_tokens(trusted, self._models)
        self.violations += [f"{text}; modes {self._mode_of}" for text in compared.violations]
        return {
            "faults": dict(self._injector.counts),
            "requests answered": len(self._finished),
            "tokens": sum(len(finished.output) for finished, *_ in self._finished),
            "tokens compared": compared.tokens,
            "ties": compared.ties,
            "outputs that the tokenizer failed on": sum(
                finished.reason.get("err_type") == "tokenizer" for finished, *_ in self._finished
            ),
            "calls ended by Control-C": self._interrupted,
            "swaps": len(self._mode_of) - 1,
            "swaps refused": self._refused,
        }

    def _prefilled_before(self, finished: Finished, asked: float) -> bool:
        """Whether a part of its prompt may have been prefilled before its first weights came in
        place: a prompt that shares its step with others is prefilled in chunks."""
        versions = [version for *_, version in finished.spans]
        return bool(versions) and (
            self._mode_of[versions[0]] == "in_place" and asked < self._swapped_at[versions[0]]
        )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    options = {
        "max_restarts": 10**6,
        "step_timeout": STEP_TIMEOUT,
        **server_args(-(-args.requests // args.engines)),
    }
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        models = two_models(Path(folder))
        with EnginePool(str(models[0]), devices=args.engines, **options) as pool:
            pool.generate_all(input_ids=[[1]] * args.requests)
            pool.update_weights(models[0], weight_version=0)
            before, used = process(), device_bytes(pool)
            with faults.refusing_devices() as refusing:
                injector = Injector(pool, random.Random(f"faults {args.seed}"), refusing)
                soak = Soak(pool, models, args, injector)
                soak.run()
            soak.check_pool()
            after, share = process(), device_bytes(pool) / used
            events = pool.events()
            report = soak.check_outputs()
    violations = soak.violations
    violations += [f"{k}: {before[k]} became {after[k]}" for k in before if before[k] != after[k]]
    if abs(share - 1) > 0.02:
        violations.append(f"device memory is {share:.3f} of what it was")
    report |= {
        **{f"engines back by {by}": len(times) for by, times in recoveries(events).items()},
        **{
            f"median ms until then, by {by}": 1000 * statistics.median(times)
            for by, times in recoveries(events).items()
            if times
        },
        "device memory, end over start": share,
        "violations": len(violations),
    }
    plain(["what", "how many"], [[key, _text(value)] for key, value in report.items()])
    print("\n".join(violations[:20]))
    if args.json:
        figures = {"jax": jax.__version__, "arguments": vars(args), **report}
        figures["violations"] = violations
        Path(args.json).write_text(json.dumps(figures, indent=2), encoding="utf-8")
    return 1 if violations else 0


def _text(value: Any) -> Any:
    if isinstance(value, dict):
        return f"{sum(value.values())}: " + ", ".join(f"{n} {k}" for k, n in sorted(value.items()))
    return f"{value:.3f}" if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
