"""What staging costs engines in int8, beside engines in the model's dtype, of the same sources.

    python -m benchmarks.weight_int8 --size-gb 0.5 --engines 2 --rounds 5

Two pools on the same devices stage the same source, in turn, while their engines idle. The figures
are medians of the report's "stage" phase.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.command import arguments, write_json
from benchmarks.synthetic import sized_config, write_model
from benchmarks.weight_cases import cases
from benchmarks.weight_update import SERVER_ARGS
from enginepool import EnginePool
from enginepool.devices import resolve_devices


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments("weight_int8", __doc__)
    add = parser.add_argument
    add("--size-gb", type=float, default=0.5, help="10^9 bytes of weights; default: 0.5")
    add("--engines", type=int, default=2)
    add("--rounds", type=int, default=5)
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--quantization", default="int8.yaml", metavar="FILE")
    args = parser.parse_args(argv)
    devices = [device for (device,) in resolve_devices(args.engines, 1)]
    rows = []
    with tempfile.TemporaryDirectory(prefix="weight-int8-") as folder, ExitStack() as stack:
        model = write_model(Path(folder), sized_config(args.size_gb * 1e9, args.dtype))
        pools = [
            stack.enter_context(
                EnginePool(str(model), devices=devices, dtype=args.dtype, **SERVER_ARGS, **more)
            )
            for more in ({}, {"quantization_config_path": args.quantization})
        ]
        for case in cases(model, devices, devices[0]):
            source = case.make()
            for pool in pools:  # the first one compiles
                pool.update_weights(source)
            seconds: list[list[float]] = [[], []]
            for _ in range(args.rounds):
                for pool, its in zip(pools, seconds, strict=True):
                    its.append(pool.update_weights(source).seconds["stage"])
            plain, quantized = map(statistics.median, seconds)
            rows.append({"source": case.name, "plain_s": plain, "quantized_s": quantized})
            print(
                f"{case.name}: {args.dtype} {plain:.3f} s, {args.quantization} {quantized:.3f} s, "
                f"{quantized / plain:.2f} times",
                flush=True,
            )
    write_json(args, rows=rows)


if __name__ == "__main__":
    main()
