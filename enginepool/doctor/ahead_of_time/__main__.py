"""Compile a pool's programs for TPU hosts that are not here, and say what they would refuse."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from enginepool.console.complaints import clear_errors
from enginepool.doctor.ahead_of_time.models import MODELS, model_config
from enginepool.doctor.ahead_of_time.programs import Sizes, compile_programs
from enginepool.doctor.ahead_of_time.record import KINDS, Compiled
from enginepool.doctor.ahead_of_time.report import as_json, table
from enginepool.doctor.ahead_of_time.topology import TOPOLOGIES

_USUAL = ("decode", "prefill", "sampler")


def main() -> None:
    options = _arguments()
    kinds = None if options.all else options.kinds or _USUAL
    sizes = Sizes(
        options.batch, options.prefill, options.context, options.page_size, options.mem_fraction
    )
    reports, refused = [], False
    with clear_errors():
        for model in options.model or ["Qwen3-4B"]:
            config = model_config(model, options.layers or None)
            for name in options.topology or ["v5e-8"]:
                heading = f"{model}, {config['num_hidden_layers']} layers, one chip of a {name}"
                programs = compile_programs(
                    TOPOLOGIES[name],
                    config,
                    sizes,
                    kinds=kinds,
                    without=options.without,
                    said=lambda program: print(_progress(program), file=sys.stderr, flush=True),
                )
                refused |= not programs or any(program.problem for program in programs)
                about: dict[str, Any] = {
                    "model": model,
                    "layers": config["num_hidden_layers"],
                    "topology": name,
                    "hbm_bytes": TOPOLOGIES[name].hbm_bytes,
                }
                reports.append(as_json(programs, **about))
                if not options.json:
                    print(f"{heading}\n\n{table(programs)}\n", flush=True)
    if options.json:
        print(json.dumps(reports))
    raise SystemExit(1 if refused else 0)


def _progress(program: Compiled) -> str:
    return (
        f"{program.kind} {program.size}: {program.seconds:.1f} s, {program.problem or 'compiles'}"
    )


def _arguments() -> argparse.Namespace:
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
    parser.add_argument("--mem-fraction", type=float, help="mem_fraction_static")
    parser.add_argument(
        "--without", action="append", default=[], metavar="PATCH", help="leave this patch out"
    )
    parser.add_argument("--json", action="store_true", help="a list of reports")
    return parser.parse_args()


if __name__ == "__main__":
    main()
