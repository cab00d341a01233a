"""Measures the CPU cost of a running pool: `enginepool doctor --profile`."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import psutil

from enginepool.doctor.step_profile import profiled

if TYPE_CHECKING:
    from enginepool.pool.pool import EnginePool

_IDLE_SECONDS = 1.0
_PROMPT = 4  # tokens


def profile(pool: EnginePool, *, requests: int, tokens: int) -> dict[str, Any]:
    """Keep the first engine busy, with the others idle, and measure its steps.

    Args:
        requests: The size of the batch throughout.
        tokens: The output tokens of each request, and so the decode steps of the run.

    Returns:
        `first_token_ms`: the wait of a request for its first token once the engine has taken it.
        Milliseconds per step: `step_ms`, the part `gil_ms` that holds the GIL (an upper bound: the
        thread's processor time), and both by section. `saturates_at`: the number of engines whose
        steps saturate the GIL. `idle_cpu_percent`, of one core, and `compilations` during the run
        should be 0.
    """
    engine: Any = pool.engines[0]
    prompts = [[1 + i, *range(2, _PROMPT + 1)] for i in range(requests)]
    params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    engine.generate(input_ids=prompts, sampling_params=params)
    engine.flush_cache()
    pool.runtime.swap_programs.join()  # what it compiles ahead would count, and take the GIL
    compiled = pool.stats()["executables"]
    started = time.perf_counter()
    with profiled(pool.runtime.workers[0]) as found:
        engine.generate(input_ids=prompts, sampling_params=params)
    # This includes the end of `profiled`: the thread goes on after its caller has the answer.
    seconds = time.perf_counter() - started
    step, gil = seconds / found.steps, found.per_step(found.cpu)
    return {
        "steps": found.steps,
        "prefills": found.prefills,
        "first_token_ms": 1000 * statistics.median(found.waits),
        "requests_in_batch": round(found.batch, 2),
        "step_ms": 1000 * step,
        "gil_ms": 1000 * gil,
        "sections": {
            name: {
                "ms": 1000 * wall / found.steps,
                "gil_ms": 1000 * found.cpu[name] / found.steps,
            }
            for name, wall in found.wall.items()
        },
        "saturates_at": int(step / gil),
        "idle_cpu_percent": idle_cpu_percent(_IDLE_SECONDS),
        "compilations": sum(pool.stats()["executables"].values()) - sum(compiled.values()),
    }


def idle_cpu_percent(seconds: float) -> float:
    """The share of one core that this process takes while the pool is idle."""
    process = psutil.Process()
    process.cpu_percent()
    time.sleep(seconds)
    return process.cpu_percent()


def show_profile(report: dict[str, Any]) -> None:
    """Print the profile for a person."""
    from rich.console import Console
    from rich.table import Table

    table = Table("section", "ms a step", "of it with the GIL")
    for name, section in report["sections"].items():
        table.add_row(name, f"{section['ms']:.3f}", f"{section['gil_ms']:.3f}")
    table.add_row("whole step", f"{report['step_ms']:.3f}", f"{report['gil_ms']:.3f}")
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{report['requests_in_batch']:g} requests in a batch, {report['steps']} steps\n"
        f"about {report['saturates_at']} such engines saturate the GIL\n"
        f"idle: {report['idle_cpu_percent']:.1f} % of a core; compilations while serving: "
        f"{report['compilations']}"
    )
