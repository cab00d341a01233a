"""Seconds from a pool's constructor to its first token. Imports are done before.

    python -m benchmarks.startup

Each pool has a process of its own. "Cold": nothing is compiled yet. "Warm": JAX's persistent
compilation cache (JAX_COMPILATION_CACHE_DIR) has the programs of an earlier run. Beside a pool of N
stand N of upstream's Engines with the same options and overlap scheduling, in N processes that
start at once; the slowest counts. All take turns; the table has medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import arguments, plain, write_json
from benchmarks.opening import first_token, upstreams_first_token
from enginepool import toy


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments("startup", __doc__)
    add = parser.add_argument
    add("--engines", type=int, nargs="+", default=[1, 2, 4, 8])
    add("--rounds", type=int, default=3)
    add("--model", default=str(toy.checkpoint()), help="directory or hub id; default: the toy")
    add("--one", type=int, metavar="N", help=argparse.SUPPRESS)  # in the pool's own process
    add("--upstream", action="store_true", help=argparse.SUPPRESS)  # or in upstream's
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.one:
        _one(args)
    runs: dict[int, dict[str, list[dict[str, Any]]]] = {
        engines: {"cold": [], "warm": [], "upstream cold": [], "upstream warm": []}
        for engines in args.engines
    }
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        for number in range(args.rounds + 1):
            for engines, kinds in runs.items():
                for who, runner in (("", _run), ("upstream ", _upstreams)):
                    warm = runner(engines, args, str(Path(folder, f"{who}{engines}")))
                    if number:  # the first filled the cache
                        kinds[who + "warm"].append(warm)
                        kinds[who + "cold"].append(runner(engines, args, None))
    plain(
        ["engines", "cold s", "upstream", "warm s", "upstream", "programs compiled"],
        [_row(engines, kinds) for engines, kinds in runs.items()],
    )
    write_json(args, runs=runs)
    return 0


def _one(args: argparse.Namespace) -> None:
    if args.upstream:
        _, found = upstreams_first_token(args.model, {})
    else:
        _, found = first_token(args.model, args.one)
    print(json.dumps(found), flush=True)
    os._exit(0)  # upstream's threads cannot be stopped


def _run(engines: int, args: argparse.Namespace, cache: str | None) -> dict[str, Any]:
    return _ended(_started(engines, args, cache))


def _upstreams(engines: int, args: argparse.Namespace, cache: str | None) -> dict[str, Any]:
    caches = [None if cache is None else f"{cache}-{index}" for index in range(engines)]
    processes = [_started(1, args, cache, "--upstream") for cache in caches]
    return max(map(_ended, processes), key=lambda run: run["seconds"])


def _started(
    engines: int, args: argparse.Namespace, cache: str | None, *more: str
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.startup", "--one", str(engines), *more]
    command += ["--model", args.model]
    env = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    if cache is not None:
        env |= {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)


def _ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{errors}\n{process.args} failed (status {process.returncode})")
    return json.loads(out.strip().splitlines()[-1])


def _row(engines: int, kinds: dict[str, list[dict[str, Any]]]) -> list[Any]:
    cells: list[Any] = [engines]
    for kind in ("cold", "upstream cold", "warm", "upstream warm"):
        cells.append(f"{statistics.median(run['seconds'] for run in kinds[kind]):.2f}")
    return [*cells, kinds["cold"][0]["programs"]]


if __name__ == "__main__":
    sys.exit(main())
