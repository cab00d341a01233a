"""Swaps of weights under load, one after the other. Every output is checked.

    python -m benchmarks.swap_soak --engines 4 --requests 64 --swaps 100
    python -m benchmarks.swap_soak --page-size 128

`--requests` are on their way all the time. Each swap begins 50 ms after the last returned, and
brings the other of two sets of weights. Callers share prefixes and repeat prompts, so engines
answer from their prefix caches.

An output must end as its mode allows. Its spans must cover it. With "retract" it gains a token
between two swaps. Every token must be the one that its version's weights give in a plain JAX
forward pass. With "in_place" that holds up to the first swap in an output: from there on its KV
cache is of other weights. The few prompts that a swap fell into are not compared. Exits with 1 if
an output is wrong.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from benchmarks.command import arguments, plain, write_json
from benchmarks.micro_pool import (
    OUTPUT,
    PROMPT,
    SHARED,
    chunks_beside_others,
    left_over,
    server_args,
    two_models,
)
from benchmarks.soak_checks import SWAP, check_end, mixed_prompt, verifiable
from benchmarks.span_checks import (
    NEAR_TIE,
    Finished,
    check_every_version,
    check_spans,
    check_tokens,
)
from enginepool import EnginePool, EnginePoolError, SwapReport

# "rolling" is a strategy, of which the mode is "drain".
MODES = ("drain", "retract", "abort", "in_place", "rolling")
_BETWEEN_SECONDS = 0.05
_END_SECONDS = 120.0  # for what is still in flight after the last swap
_SHOWN = 20
_COLUMNS = ["mode", "swaps", "requests", "cached", "chunked", "tokens", "retracts", "aborted"]
_COLUMNS += ["mixed", "pause ms", "max", "swap ms", "versions", "compared", "ties", "violations"]
_FEW_PROMPTS = 16  # that are asked again and again


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments("swap_soak", __doc__)
    add = parser.add_argument
    add("--engines", type=int, default=4)
    add("--requests", type=int, default=64, help="in flight; default: 64")
    add("--swaps", type=int, default=100, help="of each mode; default: 100")
    add("--mode", action="append", choices=MODES, help="again for more; default: all")
    add("--page-size", type=int, default=1, help="tokens of a KV page; default: 1")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.mode = args.mode or list(MODES)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    slots = -(-args.requests // args.engines)
    with tempfile.TemporaryDirectory(prefix="swap-soak-") as folder:
        models = two_models(Path(folder))
        options = server_args(slots, args.page_size)
        with EnginePool(str(models[0]), devices=args.engines, **options) as pool:
            rows = []
            for mode in args.mode:
                with chunks_beside_others() as chunked:
                    rows.append(Soak(pool, models, mode, args).run() | {"chunked": len(chunked)})
                print(f"{mode}: {len(rows[-1]['violations'])} violations", flush=True)
    plain(_COLUMNS, map(_line, rows))
    print(
        "cached: requests that found a prefix in the cache; chunked: prompts in chunks while "
        "others decoded; mixed: prompts that a swap in place fell into, not "
        "compared; compared: tokens held against a plain JAX forward pass; ties: "
        f"tokens that were not, since the two best logits are within {NEAR_TIE}"
    )
    violations = [f"{row['mode']}: {text}" for row in rows for text in row["violations"]]
    print("\n".join(violations[:_SHOWN]))
    write_json(args, rows=rows)
    return 1 if violations else 0


class Soak:
    """One mode: the load, the swaps, and the checks afterwards."""

    def __init__(
        self, pool: EnginePool, models: Sequence[Path], mode: Any, args: argparse.Namespace
    ) -> None:
        self._pool, self._models, self._mode, self._args = pool, models, mode, args
        self._random = random.Random(f"{args.seed} {mode}")
        self._prompts = [self._prompt() for _ in range(_FEW_PROMPTS)]
        self._swapping = True
        self._finished: list[tuple[Finished, int]] = []
        self._reports: list[SwapReport] = []
        self._seconds: list[float] = []
        self._violations: list[str] = []

    def run(self) -> dict[str, Any]:
        anyio.run(self._load)
        self._violations += left_over(self._pool)
        versions = range(self._args.swaps * len(MODES) + 1)
        modes: dict[int, str] = dict.fromkeys(versions, str(self._mode))
        may_end = (SWAP,) if self._mode == "abort" else ()
        finished = [request for request, _ in self._finished]
        for request, wanted in self._finished:
            self._violations += check_spans(request) + check_end(request, wanted, may_end, modes)
            if self._mode == "retract":
                self._violations += check_every_version(request)
        mixed = [request for request in finished if mixed_prompt(request)]
        if mixed and self._mode != "in_place":
            self._violations.append(f"{mixed[0]}: its prompt is of two versions")
        # Broken spans say nothing about tokens.
        trusted = [] if self._violations else [r for r in finished if r.output and r not in mixed]
        if self._mode == "in_place":
            trusted = [verifiable(request, modes) for request in trusted]
        compared = check_tokens(trusted, lambda version, _: self._models[version % 2])
        self._violations += compared.violations
        pauses = [e.pause_sec for report in self._reports for e in report.engines] or [0.0]
        retracts = sum(max(0, len(request.spans) - 1) for request in finished)
        return {
            "mode": self._mode,
            "swaps": len(self._reports),
            "requests": len(finished),
            "cached": sum(r.result["meta_info"]["cached_tokens"] > 0 for r in finished),
            "mixed": len(mixed),
            "tokens": sum(len(request.output) for request in finished),
            "retracts": retracts if self._mode == "retract" else 0,
            "aborted": sum(request.reason["type"] == "abort" for request in finished),
            "pause": statistics.median(pauses),
            "longest_pause": max(pauses),
            "swap": statistics.median(self._seconds or [0.0]),
            "versions": len({v for request in finished for *_, v in request.spans}),
            "compared": compared.tokens,
            "ties": compared.ties,
            "violations": self._violations,
        }

    async def _load(self) -> None:
        try:
            async with anyio.create_task_group() as group:
                for _ in range(self._args.requests):
                    group.start_soon(self._keep_asking)
                await self._swap()
                self._swapping = False
                group.cancel_scope.deadline = anyio.current_time() + _END_SECONDS
        finally:
            self._swapping = False
        if group.cancel_scope.cancelled_caught:
            self._violations.append(f"requests did not end within {_END_SECONDS:.0f} s")

    async def _keep_asking(self) -> None:
        while self._swapping:
            again = self._random.random() < 0.5
            prompt = self._random.choice(self._prompts) if again else self._prompt()
            wanted = self._random.randint(8, OUTPUT)
            params = {"temperature": 0.0, "max_new_tokens": wanted, "ignore_eos": True}
            try:
                (result,) = await self._pool.async_generate_all(
                    input_ids=[prompt], sampling_params=params
                )
            except EnginePoolError as error:
                self._violations.append(f"a request raised {error!r}")
                return
            self._finished.append((Finished(prompt, result), wanted))

    def _prompt(self) -> list[int]:
        """Half of them for the prefix cache, which no other version may use."""
        # Longer than a page, so that what fits in tokens does not fit in pages.
        longest = max(PROMPT, self._args.page_size + PROMPT // 2)
        own = [self._random.randrange(256) for _ in range(self._random.randint(1, longest))]
        return list(range(1, SHARED + 1)) + own if self._random.random() < 0.5 else own

    async def _swap(self) -> None:
        rolling = self._mode == "rolling"
        number = self._pool.stats()["weight_version"]
        for _ in range(self._args.swaps):
            await anyio.sleep(_BETWEEN_SECONDS)
            number += 1
            started = time.perf_counter()
            try:
                report = await self._pool.async_update_weights(
                    self._models[number % len(self._models)],
                    weight_version=number,
                    mode="drain" if rolling else self._mode,
                    strategy="rolling" if rolling else "atomic",
                )
            except EnginePoolError as error:
                self._violations.append(f"swap to version {number}: {error!r}")
                return
            self._seconds.append(time.perf_counter() - started)
            self._reports.append(report)
            if report.failed:
                self._violations.append(f"swap to version {number}: {report.failed}")


def _line(row: dict[str, Any]) -> list[Any]:
    return [
        *(row[key] for key in ("mode", "swaps", "requests", "cached", "chunked")),
        *(row[key] for key in ("tokens", "retracts", "aborted", "mixed")),
        *(f"{1000 * row[key]:.1f}" for key in ("pause", "longest_pause", "swap")),
        *(row[key] for key in ("versions", "compared", "ties")),
        len(row["violations"]),
    ]


if __name__ == "__main__":
    sys.exit(main())
