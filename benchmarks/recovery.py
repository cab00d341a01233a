"""How soon an engine serves again after a fault, and the throughput without it.

    python -m benchmarks.recovery

First: the toy's milliseconds from a failed step to serving, by a reset and by a rebuild (the reset
is made to fail). Then: tokens per second while one engine hangs in a step, over those of all
engines, in turn. Its model is a micro one whose steps take `--step-ms` longer, with the GIL
released.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import simulated
from benchmarks.command import arguments, plain, write_json
from benchmarks.load import Load
from benchmarks.synthetic import micro_config, write_model
from enginepool import EnginePool
from tests.support import faults

_LIMIT_SECONDS = 300.0
_STEP_TIMEOUT = 1.0
_SETTLE_SECONDS = 1.0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments("recovery", __doc__)
    add = parser.add_argument
    add("--engines", type=int, default=4)
    add("--rounds", type=int, default=5)
    add("--step-ms", type=float, default=10.0)
    add("--seconds", type=float, default=5.0, help="of each window; default: 5")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    seconds = times(args.engines, args.rounds)
    shares = throughput(args)
    rows = [
        [f"failed step to serving, by {by}", *_spread([1000 * s for s in took]), "ms"]
        for by, took in seconds.items()
    ]
    rows.append(
        [f"throughput with one of {args.engines} out", *_spread([100 * s for s in shares]), "%"]
    )
    plain(["what", "median", "least", "most", "unit"], rows)
    write_json(args, seconds=seconds, throughput=shares)
    return 0


def times(engines: int, rounds: int) -> dict[str, list[float]]:
    """The toy's seconds from a failed step to serving, by reset and by rebuild."""
    seconds: dict[str, list[float]] = {"reset": [], "rebuild": []}
    with EnginePool(devices=engines, max_restarts=10**6) as pool:
        pool.generate_all(["1+1="] * engines)
        for number in range(rounds):
            for by, took in seconds.items():
                took.append(_time(pool, number % engines, by))
    return seconds


def _time(pool: EnginePool, engine_index: int, by: str) -> float:
    before = len(pool.events())
    if by == "rebuild":
        faults.raise_in_reset(pool, engine_index)
    faults.raise_in_step(pool, engine_index)
    pool.engines[engine_index].generate("1+1=")  # waits for its engine
    down, *_, up = pool.events()[before:]  # between them, a reset that failed
    if (down["event"], up["event"], up["by"]) != ("engine_quarantined", "engine_recovered", by):
        raise RuntimeError(f"expected a {by}, got {down} and {up}")
    return up["time"] - down["time"]


def throughput(args: argparse.Namespace) -> list[float]:
    """Tokens per second while one engine is out, over those of all engines, by round."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        model = write_model(Path(folder, "model"), micro_config())
        accelerator = simulated.install()
        options = simulated.SERVER_ARGS
        with EnginePool(
            str(model), devices=args.engines, step_timeout=_STEP_TIMEOUT, **options
        ) as pool:
            accelerator.reset(args.step_ms / 1000)
            with Load(pool) as load:
                load.wait_for_steps(20)
                return [_share(pool, load, i % args.engines, args) for i in range(args.rounds)]


def _share(pool: EnginePool, load: Load, engine_index: int, args: argparse.Namespace) -> float:
    full = _tokens(load, args.seconds)
    let_go = faults.hang_in_step(pool, engine_index)
    try:
        _until(lambda: pool.stats()["engines"][engine_index]["state"] == "abandoned")
        time.sleep(_SETTLE_SECONDS)  # its requests go on elsewhere
        without = _tokens(load, args.seconds)
    finally:
        let_go.set()
    _until(lambda: pool.stats()["engines"][engine_index]["state"] == "serving")
    time.sleep(_SETTLE_SECONDS)
    return without / full


def _tokens(load: Load, seconds: float) -> float:
    """Tokens per second, measured for so many seconds."""
    tokens, started = load.tokens(), time.perf_counter()
    time.sleep(seconds)
    return (load.tokens() - tokens) / (time.perf_counter() - started)


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _LIMIT_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not reached within {_LIMIT_SECONDS:.0f} s")
        time.sleep(0.01)


def _spread(values: Sequence[float]) -> list[str]:
    return [f"{value:.1f}" for value in (statistics.median(values), min(values), max(values))]


if __name__ == "__main__":
    sys.exit(main())
