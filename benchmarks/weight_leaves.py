"""What a leaf of an update costs the host: `python -m benchmarks.weight_update --leaves 399`."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import simulated
from benchmarks.command import plain, write_json
from benchmarks.load import Load
from benchmarks.synthetic import nano_config, write_model
from benchmarks.weight_cases import Case, cases
from enginepool import EnginePool
from scripts.train_toy.checkpoint import parameter_shapes

_STEP = 0.02  # seconds of the simulated accelerator
_SECONDS = 3.0  # for which decode is measured
_STEPS_BEFORE = 8  # of every engine
_HEADERS = ["source", "stage µs", "plain JAX µs", "stage ms", "whole update µs", "first ms"]
_HEADERS += ["decode meanwhile", "beside plain JAX"]


def measure(args: argparse.Namespace, devices: Sequence[jax.Device], other: jax.Device) -> None:
    """Print and write the host's time per leaf and engine, for every source."""
    accelerator = simulated.install()
    config = _config(args.leaves)
    leaves = len(parameter_shapes(config))
    rows = []
    with tempfile.TemporaryDirectory(prefix="weight-leaves-") as folder:
        directory = write_model(Path(folder), config)
        server_args: dict[str, Any] = simulated.SERVER_ARGS | {"load_format": "dummy"}
        with EnginePool(str(directory), devices=list(devices), **server_args) as pool:
            for case in cases(directory, devices, other, every=True):
                row = _row(pool, case, args.rounds, leaves * len(devices))
                accelerator.reset(_STEP)
                row |= _decode_shares(pool, case)
                accelerator.reset(0.0)
                rows.append(row)
                print(f"measured {case.name}", flush=True)
    print(f"\n{leaves} leaves, {len(devices)} engines. Processor time per leaf and engine.")
    plain(_HEADERS, map(_line, rows))
    write_json(args, leaves=leaves, engines=len(devices), rows=rows)


def _config(leaves: int) -> dict[str, Any]:
    """The smallest Qwen3 with about so many tensors."""
    rest, one = (len(parameter_shapes(_with_layers(count))) for count in (0, 1))
    return _with_layers(max(1, round((leaves - rest) / (one - rest))))


def _with_layers(layers: int) -> dict[str, Any]:
    return nano_config() | {"num_hidden_layers": layers, "tie_word_embeddings": False}


def _row(pool: EnginePool, case: Case, rounds: int, parts: int) -> dict[str, Any]:
    source, peer = case.make(), case.peer
    runs = [_round(pool, source, peer) for _ in range(rounds + 1)]
    first, *runs = runs

    def median(key: str) -> float:
        return statistics.median(run[key] for run in runs)

    row = {key: 1e6 * median(key) / parts for key in first if key.endswith("_cpu")}
    return {"name": case.name, "first": first["stage"], "stage": median("stage"), **row}


def _round(pool: EnginePool, source: Any, peer: Callable[[Any], Any] | None) -> dict[str, float]:
    stage, staged = _timed(lambda: pool.stage_weights(source))
    staged.discard()
    update, _ = _timed(lambda: pool.update_weights(source))
    figures = {"stage": stage[0], "stage_cpu": stage[1], "update_cpu": update[1]}
    if peer is not None:
        figures["plain_cpu"] = _timed(lambda: peer(source))[0][1]
    return figures


def _timed(function: Callable[[], Any]) -> tuple[tuple[float, float], Any]:
    """Wall and processor seconds, and the result."""
    wall, cpu = time.perf_counter(), time.process_time()
    made = function()
    return (time.perf_counter() - wall, time.process_time() - cpu), made


def _decode_shares(pool: EnginePool, case: Case) -> dict[str, float]:
    """Tokens a second, relative to undisturbed decode: while weights are staged again and again,
    and while plain JAX moves them."""
    source, peer = case.make(), case.peer
    jobs: dict[str, Callable[[], Any]] = {
        "decode_share": lambda: pool.stage_weights(source).discard()
    }
    if peer is not None:
        jobs["plain_decode_share"] = lambda: peer(source)
    with Load(pool) as load:
        load.wait_for_steps(_STEPS_BEFORE)
        undisturbed = _rate(load, lambda: time.sleep(0.1))
        return {key: _rate(load, job) / undisturbed for key, job in jobs.items()}


def _rate(load: Load, meanwhile: Callable[[], None]) -> float:
    before, started = load.tokens(), time.perf_counter()
    while (seconds := time.perf_counter() - started) < _SECONDS:
        meanwhile()
    return (load.tokens() - before) / seconds


def _line(row: dict[str, Any]) -> list[str]:
    return [
        row["name"],
        f"{row['stage_cpu']:.0f}",
        f"{row['plain_cpu']:.0f}" if "plain_cpu" in row else "",
        f"{1000 * row['stage']:.1f}",
        f"{row['update_cpu']:.0f}",
        f"{1000 * row['first']:.0f}",
        f"{row['decode_share']:.0%}",
        f"{row['plain_decode_share']:.0%}" if "plain_decode_share" in row else "",
    ]
