"""Random faults in the engines of a pool, under load, with swaps in every mode and pauses.

    python -m benchmarks.soak --minutes 10 --seed 1
    python -m benchmarks.soak --minutes 10 --page-size 128
    python -m benchmarks.soak --minutes 30 --faults-per-minute 0     # healthy traffic alone

Callers share prompts, time out, leave, abort and close their streams. Most name one of three
adapters. There are two slots for these. Adapters are replaced in every mode, and unloaded. Some
callers give a stop string that the model spells in more tokens than the tokenizer does. With
faults, some send a prompt without finite numbers, and now and then a step breaks during a swap.
`max_restarts` is raised for the run.

Exits with 1 unless:
- every prompt has one answer, and its tokens are those of a plain JAX forward pass with the same
  versions of weights and adapter; this holds for answers without text (a broken tokenizer), too;
- text, ids and log-probabilities end with the token that completes a stop string;
- outputs have several versions only in the modes that allow it;
- no caller gets an error that it did not cause, and no engine is reset without a fault;
- at the end every engine serves with the same weights and holds nothing, and memory, threads,
  signal handlers and child processes are as at the start.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from benchmarks.command import arguments, plain, write_json
from benchmarks.fuzz_law import Law
from benchmarks.injector import STEP_TIMEOUT, Injector
from benchmarks.merges import write_speller
from benchmarks.micro_pool import ADAPTED, left_over, server_args, spoil, write_adapters
from benchmarks.soak_adapters import Adapters
from benchmarks.soak_checks import (
    check_early_end,
    check_modes,
    device_bytes,
    mixed_prompt,
    process,
    unexplained,
    verifiable,
)
from benchmarks.soak_load import Callers
from benchmarks.soak_swaps import Swaps
from benchmarks.span_checks import Finished, check_spans, check_tokens
from benchmarks.synthetic import micro_config
from enginepool import EnginePool, EnginePoolError
from enginepool.toy.files import END_ID
from tests.support import faults

_LULL_EVERY = 3.0  # seconds, at most, from one to the next
_END_SECONDS = 120.0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments("soak", __doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=10.0)
    add("--seed", type=int, default=0)
    add("--engines", type=int, default=4)
    add("--requests", type=int, default=32, help="in flight; default: 32")
    add("--page-size", type=int, default=1, help="tokens of a KV page; default: 1")
    add("--faults-per-minute", type=float, default=20.0)
    return parser.parse_args(argv)


class Soak:
    """The load, the faults, the swaps, and their outcome."""

    def __init__(
        self, pool: EnginePool, adapters: Adapters, args: argparse.Namespace, injector: Injector
    ) -> None:
        self._adapters, self._args, self._injector = adapters, args, injector
        faulty = bool(args.faults_per_minute)
        self._swaps = Swaps(pool, adapters.models, args.seed, injector if faulty else None)
        self._random = random.Random(args.seed)
        self._callers = Callers(pool, random.Random(f"callers {args.seed}"), bad=faulty)
        self._running = True
        self._lull = False
        self._in_call = 0
        self.violations: list[str] = []

    def run(self) -> None:
        """On the main thread, where Control-C arrives."""
        load = threading.Thread(target=self._run_load, name="soak-load")
        load.start()
        while self._running:
            try:
                if self._lull:
                    time.sleep(0.01)
                else:
                    self._callers.call_from_this_thread()
            except KeyboardInterrupt:
                continue
            except EnginePoolError as error:
                self.violations.append(f"a call raised {error!r}")
        load.join()

    def _run_load(self) -> None:
        try:
            anyio.run(self._load)
        except BaseException as error:
            self.violations.append(f"the load ended early: {error!r}")
            raise

    async def _load(self) -> None:
        try:
            async with anyio.create_task_group() as group:
                for _ in range(self._args.requests):
                    group.start_soon(self._keep_asking)
                for change in (self._swaps.swap, self._swaps.pause, self._adapters.change):
                    group.start_soon(change, lambda: self._running)
                group.start_soon(self._rest)
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
            if self._lull:
                await anyio.sleep(0.01)
                continue
            self._in_call += 1
            try:
                await self._callers.call()
            except EnginePoolError as error:
                self.violations.append(f"a call raised {error!r}")
            finally:
                self._in_call -= 1

    async def _break(self) -> None:
        if not self._args.faults_per_minute:
            await anyio.sleep_forever()
        while True:
            await anyio.sleep(self._random.expovariate(self._args.faults_per_minute / 60))
            await anyio.to_thread.run_sync(self._injector.inject)

    async def _rest(self) -> None:
        """Stop all callers now and then, because an idle engine checks its KV pages."""
        while self._running:
            await anyio.sleep(self._random.uniform(0.0, _LULL_EVERY))
            self._lull = True
            while self._in_call and self._running:
                await anyio.sleep(0.01)
            await anyio.sleep(0.1)
            self._lull = False

    # Afterwards

    def check_outputs(self) -> dict[str, Any]:
        trusted, mixed, answers = [], 0, self._callers.answers
        if not self._args.faults_per_minute:
            self.violations += [f"an adapter: {said}" for said in self._adapters.refused]
        law = Law(self._adapters.models[0], {END_ID})
        self.violations += self._callers.violations + self._swaps.violations
        for answer in answers:
            finished, modes = answer.finished, (self._swaps.mode_of, self._adapters.mode_of)
            found = check_spans(finished) + check_modes(finished, *modes)
            if finished.reason["type"] == "abort":
                found += check_early_end(finished, answer.may_end)
            else:
                found += law.faults(finished, answer.params)
            self.violations += found
            if mixed_prompt(finished, self._args.page_size, self._adapters.mode_of):
                mixed += 1
            elif not found and finished.output:
                trusted.append(verifiable(finished, *modes))
        compared = check_tokens(trusted, self._adapters.model_of)
        self.violations += [f"{text}; modes {self._swaps.mode_of}" for text in compared.violations]
        return {
            "faults": dict(self._injector.counts),
            "calls": dict(self._callers.calls),
            "requests answered": len(answers),
            "of them with adapters": sum(answer.finished.adapter is not None for answer in answers),
            "tokens": sum(len(answer.finished.output) for answer in answers),
            "tokens compared": compared.tokens,
            "ties": compared.ties,
            "prompts that a swap in place fell into, not compared": mixed,
            "ended": dict(collections.Counter(_reason(answer.finished) for answer in answers)),
            "prompts ended as not finite": self._callers.not_finite,
            "swaps": len(self._swaps.mode_of) - 1,
            "swaps that a fault ended": self._swaps.refused + len(self._adapters.refused),
            "adapters loaded": sum(map(len, self._adapters.mode_of.values())),
        }


def _reason(finished: Finished) -> str:
    return finished.reason.get("err_type", finished.reason["type"])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    options = {
        "max_restarts": 10**6,
        "step_timeout": STEP_TIMEOUT,
        **server_args(-(-args.requests // args.engines), args.page_size),
        **ADAPTED,
    }
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        # Of the same shape. They spell strings in twice as many tokens as their tokenizer does.
        models = [write_speller(Path(folder, str(n)), micro_config(), seed=n) for n in range(2)]
        models = [spoil(model) for model in models]
        folders = write_adapters(Path(folder), 2, models)
        with EnginePool(str(models[0]), devices=args.engines, **options) as pool:
            pool.generate_all(input_ids=[[1]] * args.requests)
            pool.update_weights(models[0], weight_version=0)
            before, used = process(), device_bytes(pool)
            with faults.refusing_devices() as refusing:
                injector = Injector(pool, random.Random(f"faults {args.seed}"), refusing)
                adapters = Adapters(pool, models, folders, args.seed)
                soak = Soak(pool, adapters, args, injector)
                soak.run()
            soak.violations += left_over(pool, _END_SECONDS)
            after, share = process(), device_bytes(pool) / used
            events = pool.events()
            report = soak.check_outputs()
    violations = soak.violations + unexplained(events)
    violations += [f"{k}: {before[k]} became {after[k]}" for k in before if before[k] != after[k]]
    if abs(share - 1) > 0.02:
        violations.append(f"device memory is {share:.3f} of what it was")
    report |= {"device memory, end over start": round(share, 3), "violations": len(violations)}
    plain(["what", "how many"], [[key, str(value)] for key, value in report.items()])
    print("\n".join(violations[:20]))
    write_json(args, **report | {"violations": violations})
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
