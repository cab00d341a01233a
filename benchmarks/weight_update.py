"""How fast `update_weights` is, beside plain JAX on the same bytes in the same run.

    python -m benchmarks.weight_update --size-gb 1 --engines 4 --rounds 3
    python -m benchmarks.weight_update --leaves 399
    python -m benchmarks.weight_update --int8 --size-gb 0.5 --rounds 5

The model is a Qwen3 of random weights. Engines idle, and the sum of the report's phases "stage" and
"commit" is compared with plain JAX. The wait for a step boundary lies between the two and is not in
the sum. The fingerprints of the weights follow while engines generate. They and the total have
columns of their own. The pause is measured with engines that generate.

With --leaves the model has many tiny leaves. The figures are then processor time of the host, per
leaf and engine: of `stage_weights`, of plain JAX that moves all leaves in one call, and of a whole
update. "First" is the wall time of a source's first staging. "Decode meanwhile" is the speed of
engines on a simulated accelerator of 20 ms steps, over their undisturbed speed, while weights are
staged again and again. "Beside plain JAX" is their speed while plain JAX moves weights again and
again.

With --int8 a pool in int8 and a pool in bfloat16 stage each source in turn. The figures are medians
of the phase "stage".
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax

from benchmarks.command import arguments, plain, write_json
from benchmarks.load import Load
from benchmarks.synthetic import sized_config, weight_bytes, write_model
from benchmarks.weight_cases import cases, devices_and_another, measure, own_layout
from benchmarks.weight_leaves import measure as measure_leaves
from benchmarks.weight_peers import Leaves
from enginepool import EnginePool
from enginepool.runtime.quiesce import SwapMode

# Two programs, and a KV cache that is small beside any weights.
_SERVER_ARGS: dict[str, Any] = {
    "load_format": "dummy",
    "context_length": 128,
    "max_running_requests": 2,
    "max_total_tokens": 256,
    "max_prefill_tokens": 64,
    "chunked_prefill_size": 64,
    "precompile_token_paddings": [64],
    "precompile_bs_paddings": [2],
}
_M_MMAP_THRESHOLD = -3  # <malloc.h>
_STEPS_BETWEEN = 8  # of every engine, undisturbed, from one update to the next
_PAUSE_MODES: tuple[SwapMode, ...] = ("retract", "in_place", "drain")
_HEADERS = ["source", "GB", "stage s", "commit s", "sum s", "peer s", "peer/sum", "GB/s"]
_HEADERS += ["fingerprint s", "total s", "leaves copied"]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments("weight_update", __doc__)
    add = parser.add_argument
    add("--size-gb", type=float, default=1.0, help="10^9 bytes of weights; default: 1")
    add("--engines", type=int, default=4, help="each holds two sets of weights; default: 4")
    add("--leaves", type=int, help="instead of a size: the host's time for so many tiny leaves")
    add("--int8", action="store_true", help="instead: a pool in int8 beside one in bfloat16")
    add("--rounds", type=int, default=3, help="of pool and plain JAX in turn; default: 3")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    _return_memory_at_once()
    devices, other = devices_and_another(args.engines)
    if args.leaves:
        measure_leaves(args, devices, other)
        return
    if args.int8:
        _beside_bfloat16(args, devices, other)
        return
    dtype = "float32" if devices[0].platform == "cpu" else "bfloat16"
    config = sized_config(args.size_gb * 1e9, dtype)
    nbytes = weight_bytes(config)
    print(
        f"{args.engines} engines on {devices[0].platform}, {config['num_hidden_layers']} layers, "
        f"{nbytes / 1e9:.3f} GB of {dtype} each; JAX {jax.__version__}"
    )
    rows = []
    with tempfile.TemporaryDirectory(prefix="weight-update-") as folder:
        directory = write_model(Path(folder), config)
        with EnginePool(str(directory), devices=devices, dtype=dtype, **_SERVER_ARGS) as pool:
            for case in cases(directory, devices, other):
                rows.append(measure(pool, case, args.rounds))
                print(f"measured {case.name}", flush=True)
            if len({row["fingerprint"] for row in rows}) > 1:
                sys.exit(f"every source has the same weights, but the engines differ: {rows}")
            pauses = _pauses(pool, own_layout(directory, other), args.rounds)
    figures = {"nbytes": nbytes, "rows": rows, "pauses": pauses}
    _show(figures)
    write_json(args, **figures)


def _beside_bfloat16(
    args: argparse.Namespace, devices: Sequence[jax.Device], other: jax.Device
) -> None:
    rows: list[dict[str, Any]] = []
    options: dict[str, Any] = {"devices": devices, "dtype": "bfloat16"} | _SERVER_ARGS
    with tempfile.TemporaryDirectory(prefix="weight-int8-") as folder, ExitStack() as stack:
        model = write_model(Path(folder), sized_config(args.size_gb * 1e9, "bfloat16"))
        pools = [
            stack.enter_context(EnginePool(str(model), quantization_config_path=file, **options))
            for file in (None, "int8.yaml")
        ]
        for case in cases(model, devices, other):
            source = case.make()
            rounds = [
                [pool.update_weights(source).seconds["stage"] for pool in pools]
                for _ in range(args.rounds + 1)  # the first one compiles
            ]
            whole, int8 = map(statistics.median, zip(*rounds[1:], strict=True))
            rows.append({"source": case.name, "plain_s": whole, "quantized_s": int8})
            said = f"{case.name}: bfloat16 {whole:.3f} s, int8 {int8:.3f} s"
            print(f"{said}, {int8 / whole:.2f} times", flush=True)
    write_json(args, rows=rows)


def _return_memory_at_once() -> None:
    """Have glibc map memory for every array and give it back with the array. Otherwise times depend
    on what it kept from the run before."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def _pauses(pool: EnginePool, leaves: Leaves, rounds: int) -> list[dict[str, Any]]:
    """How long engines that generate pause for an update, by mode and engine."""
    rows = []
    for mode in _PAUSE_MODES:
        reports, updates = [], []
        with Load(pool) as load:
            for _ in range(rounds):
                load.wait_for_steps(_STEPS_BETWEEN)
                started = time.perf_counter()
                reports.append(pool.update_weights(leaves, mode=mode, staging="double"))
                updates.append((started, time.perf_counter()))
            load.wait_for_steps(_STEPS_BETWEEN)
        steps = load.step_seconds(without=updates)
        waits = [report.seconds["quiesce"] for report in reports]
        for index in steps:
            pauses = [report.engines[index].pause_sec for report in reports]
            rows.append(
                {
                    "mode": mode,
                    "engine_index": index,
                    "pauses": pauses,
                    "pause": statistics.median(pauses),
                    "longest": max(pauses),
                    "step": steps[index],
                    "steps": statistics.median(pauses) / steps[index],
                    "wait": statistics.median(waits),
                }
            )
        print(f"measured the pause with {mode}", flush=True)
    return rows


def _show(figures: dict[str, Any]) -> None:
    print(
        "\nUpdates of idle engines. Stage + commit is compared with plain JAX, the peer. The total "
        "has the\nfingerprints and the wait for a step boundary, too."
    )
    plain(_HEADERS, map(_line, figures["rows"]))
    print("\nUpdates of engines that generate, staged beforehand.")
    plain(
        ("mode", "engine", "pause ms", "longest ms", "step ms", "pause/step", "wait s"),
        (
            (
                row["mode"],
                row["engine_index"],
                *(f"{1000 * row[key]:.1f}" for key in ("pause", "longest", "step")),
                f"{row['steps']:.2f}",
                f"{row['wait']:.2f}",
            )
            for row in figures["pauses"]
        ),
    )
    print("wait: from staged until all engines stopped; with drain until outputs have ended.")


def _line(row: dict[str, Any]) -> list[str]:
    ours = [f"{row[key]:.3f}" for key in ("stage", "commit", "ours")]
    peer = ["", "", ""]
    if "peer" in row:
        peer = [f"{row['peer']:.3f}", f"{row['of_peer']:.0%}", f"{row['gb_per_sec']:.2f}"]
    rest = [f"{row[key]:.3f}" for key in ("verify", "total")]
    copied = f"{row['copied']:.0f} of {row['copied'] + row['shared']:.0f}"
    return [row["name"], f"{row['gb']:.3f}", *ours, *peer, *rest, copied]


if __name__ == "__main__":
    main()
