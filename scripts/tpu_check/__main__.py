"""Compile a pool's programs for TPU hosts that are not here, and report what a TPU would refuse."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from enginepool.config import PoolConfig
from enginepool.console.complaints import clear_errors
from enginepool.doctor.ahead_of_time.programs import compile_programs
from enginepool.doctor.ahead_of_time.record import KINDS, Record
from enginepool.sizing.chips import TOPOLOGIES, topology
from scripts.tpu_check.engine import MODELS, Sizes, model_config, refuse_what_fails
from scripts.tpu_check.report import overview, table

_USUAL = ("decode", "steady", "prefill", "sampler")


def main() -> None:
    options = arguments().parse_args()
    with clear_errors():
        raise SystemExit(1 if _check(options) else 0)


def _check(options: argparse.Namespace) -> bool:
    """Compile the programs that are asked for, and print a report. Returns whether a TPU would
    refuse any."""
    kinds = None if options.all else options.kinds or _USUAL
    sizes = Sizes(
        *(options.batch, options.prefill, options.context, options.page_size),
        *(options.mem_fraction, options.lora, options.quantization),
    )
    asked = [
        (model, model_config(model, options.layers or None), topology(name))
        for model in options.model or ["Qwen3-4B"]
        for name in options.topology or ["v5e-8"]
    ]
    for _, config, host in asked:
        refuse_what_fails(host, config, sizes)
    reports, refused = [], False
    for model, config, host in asked:
        layers = config["num_hidden_layers"]
        record = compile_programs(
            host,
            config,
            sizes.server_args(),
            max_decode_steps=options.max_decode_steps,
            kinds=kinds,
            without=options.without,
            further=_weight_programs,
            said=lambda program: print(program.line(), file=sys.stderr, flush=True),
        )
        programs = record.programs
        refused |= not record.steps or any(program.problem for program in programs)
        about: dict[str, Any] = {
            "model": model,
            "layers": layers,
            "topology": host.name,
            "hbm_bytes": host.chip.hbm_bytes,
            "steps": record.steps,
            "steady_steps": record.steady_steps,
        }
        reports.append(about | {"programs": [program.as_dict() for program in programs]})
        if not options.json:
            heading = f"{model}, {layers} layers, one chip of a {host.name}"
            steps = (
                f"Steps of requests of every shape, with these programs: {record.steps:,}, "
                f"{record.steady_steps:,} of them steady"
            )
            print(f"{heading}\n\n{table(programs)}\n\n{steps}\n", flush=True)
    if options.json:
        print(json.dumps(reports))
    elif len(reports) > 1:
        print(overview(reports))
    return refused


def _weight_programs(scheduler: Any, chips: list[Any], record: Record) -> None:
    # Imported here, because the patches must be applied before sgl_jax is imported.
    from scripts.tpu_check.weight_programs import weight_programs

    weight_programs(scheduler, chips, record)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make tpu-check", description=__doc__)
    parser.add_argument(
        "--topology", action="append", choices=TOPOLOGIES, help="repeatable (default: v5e-8)"
    )
    parser.add_argument(
        "--model",
        action="append",
        help=f"{', '.join(MODELS)}, or a folder with a config.json; repeatable (default: Qwen3-4B)",
    )
    parser.add_argument("--layers", type=int, default=2, help="0 for the model's own (default: 2)")
    parser.add_argument(
        "--kind",
        dest="kinds",
        action="append",
        choices=sorted(KINDS),
        help=f"repeatable (default: {', '.join(_USUAL)})",
    )
    parser.add_argument("--all", action="store_true", help="every kind of program")
    usual = Sizes()
    parser.add_argument("--batch", type=int, default=usual.batch)
    parser.add_argument("--prefill", type=int, default=usual.prefill, help="tokens")
    parser.add_argument("--context", type=int, default=usual.context)
    parser.add_argument("--page-size", type=int, default=usual.page_size)
    parser.add_argument("--max-decode-steps", type=int, default=PoolConfig.max_decode_steps)
    parser.add_argument(
        "--mem-fraction", type=float, help="mem_fraction_static (default: the pool's)"
    )
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="with eight adapters")
    parser.add_argument(
        "--quantization", metavar="FILE", help="quantization_config_path, such as int8.yaml"
    )
    parser.add_argument(
        "--without", action="append", default=[], metavar="PATCH", help="leave this patch out"
    )
    parser.add_argument("--json", action="store_true", help="a list of reports")
    return parser


if __name__ == "__main__":
    main()
