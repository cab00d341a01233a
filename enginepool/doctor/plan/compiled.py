"""Compiles an engine's programs for the chip of a plan, and reports what they need."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from enginepool.doctor.ahead_of_time.programs import compile_programs
from enginepool.doctor.ahead_of_time.record import FORWARD, STEP, Compiled
from enginepool.doctor.plan.bounds import Layout
from enginepool.model_config.config_json import written
from enginepool.sizing.chips import Topology
from enginepool.sizing.memory import Memory, StepPrograms


def compile_steps(
    model: str, where: Topology, layout: Layout, server_args: Mapping[str, Any]
) -> list[Compiled]:
    """Compile every program of a step of one engine of this layout. Nothing is run. Standard error
    gets a line for each program.

    Raises:
        InvalidConfig: libtpu is not installed, or upstream refuses the sizes.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")  # no device is needed, and none is taken
    fraction = layout.memory.settings.fraction
    return compile_programs(
        where,
        written(model, server_args.get("revision"), server_args.get("download_dir")),
        {**server_args, "mem_fraction_static": fraction},
        tp_size=layout.tp_size,
        kinds=STEP,
        said=lambda program: print(program.line(), file=sys.stderr, flush=True),
    ).programs


def step_programs(programs: Sequence[Compiled]) -> StepPrograms:
    """The sizes of these programs, as the arithmetic takes them."""
    forward = [program for program in programs if program.kind in FORWARD]
    others = [program for program in programs if program.kind not in FORWARD]
    return StepPrograms(
        count=len(forward),
        code=sum(program.code for program in programs),
        prefill_temporaries=_most("temporaries", forward),
        sampler_temporaries=_most("temporaries", others),
        logits=max((program.arguments + program.results for program in others), default=0),
    )


def by_the_compiler(
    programs: Sequence[Compiled], arithmetic: Memory, memory: Memory, engines: int
) -> dict[str, Any]:
    """The compiler's figures beside those of the arithmetic."""
    forward = [program for program in programs if program.kind in FORWARD]
    arguments = _most("arguments", forward)
    counted = arithmetic.weights + arithmetic.kv
    seconds = sum(program.lowering_seconds + program.cpu_seconds for program in programs)
    return {
        "argument_bytes": arguments,
        "argument_bytes_by_arithmetic": counted,
        "decode_temporary_bytes": _most(
            "temporaries", [program for program in forward if program.kind != "prefill"]
        ),
        "reserve_bytes": memory.reserve,
        "reserve_bytes_by_arithmetic": arithmetic.reserve,
        "memory_bytes": arguments + memory.reserve,
        "memory_bytes_by_arithmetic": counted + arithmetic.reserve,
        "programs": len(programs),
        "cpu_seconds_of_an_engine": seconds,
        "startup_cpu_seconds": seconds * engines,
        "problems": [
            f"{program.kind} {program.size}: {program.problem}"
            for program in programs
            if program.problem
        ],
    }


def _most(name: str, programs: Sequence[Compiled]) -> int:
    return max((getattr(program, name) for program in programs), default=0)
