"""How long a pool in int8 stages new weights, beside a pool in bfloat16.

    python -m benchmarks.weight_int8 --size-gb 0.5 --engines 4 --rounds 5

Two pools on the same devices stage the same source, in turn, while their engines idle. The figures
are medians of the report's "stage" phase. An update quantizes each matrix once, on the first
engine's device, and copies the integers to the others. If a matrix is sharded over the engines'
devices, each device quantizes its own part.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.command import arguments, write_json
from benchmarks.synthetic import sized_config, write_model
from benchmarks.weight_cases import cases, devices_and_another
from benchmarks.weight_update import SERVER_ARGS
from enginepool import EnginePool


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments("weight_int8", __doc__)
    add = parser.add_argument
    add("--size-gb", type=float, default=0.5, help="10^9 bytes of weights; default: 0.5")
    add("--engines", type=int, default=4)
    add("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    devices, other = devices_and_another(args.engines)
    int8: dict[str, Any] = {"quantization_config_path": "int8.yaml"}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="weight-int8-") as folder, ExitStack() as stack:
        model = write_model(Path(folder), sized_config(args.size_gb * 1e9, "bfloat16"))
        pools = [
            stack.enter_context(
                EnginePool(str(model), devices=devices, dtype="bfloat16", **SERVER_ARGS, **more)
            )
            for more in ({}, int8)
        ]
        for case in cases(model, devices, other):
            source = case.make()
            jobs = [functools.partial(_stage, pool, source) for pool in pools]
            for job in jobs:  # the first one compiles
                job()
            runs = [[job() for job in jobs] for _ in range(args.rounds)]
            plain, quantized = map(statistics.median, zip(*runs, strict=True))
            rows.append({"source": case.name, "plain_s": plain, "quantized_s": quantized})
            said = f"{case.name}: bfloat16 {plain:.3f} s, int8 {quantized:.3f} s"
            print(f"{said}, {quantized / plain:.2f} times", flush=True)
    write_json(args, rows=rows)


def _stage(pool: EnginePool, source: Any) -> float:
    return pool.update_weights(source).seconds["stage"]


if __name__ == "__main__":
    main()
