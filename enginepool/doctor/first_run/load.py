"""Times all engines at work, and the idle pool: wall time, steps, the cost of idling."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from enginepool.doctor.first_run.checklist import Finding
from enginepool.doctor.first_run.compilations import counted
from enginepool.doctor.first_run.goldens import CALL_SECONDS, missing
from enginepool.doctor.profile import idle_cpu_percent, profile

if TYPE_CHECKING:
    from enginepool.pool.pool import EnginePool

BATCH = 8  # requests of an engine; the pool is built for as many
TOKENS = 128
_IDLE_SECONDS = 3.0
# Percent of one core. A pool takes less than 1 on CPU; an accelerator's runtime has threads of its
# own.
_IDLE_PERCENT = 5.0


def wall(pool: EnginePool, found: Finding) -> None:
    """Time the same work on every engine at once, and then one engine's part of it alone."""
    engines = len(pool.engines)
    pool.flush_cache()
    with counted() as programs:
        started = time.perf_counter()
        results = pool.generate_all(
            input_ids=_prompts(engines * BATCH), sampling_params=_params(), timeout=CALL_SECONDS
        )
        seconds = time.perf_counter() - started
    busy = {e["engine_index"]: e["busy_seconds"] for e in pool.stats()["engines"]}
    took_part = {result["meta_info"]["engine_index"] for result in results} - {None}
    tokens = sum(result["meta_info"]["completion_tokens"] for result in results)
    slowest = max(busy[index] for index in took_part)
    found.seen |= {
        "wall_seconds": seconds,
        "busy_seconds": [busy[index] for index in sorted(took_part)],
        "wall_over_slowest": seconds / slowest,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "compiled": len(programs),
    }
    found.problems += missing(pool, took_part)
    wanted = engines * BATCH * TOKENS
    found.expect(tokens == wanted, f"{tokens} of {wanted} tokens were made")
    found.expect(not programs, f"{len(programs)} programs were compiled to serve")
    engine: Any = pool.engines[min(took_part)]
    pool.flush_cache()
    started = time.perf_counter()
    engine.generate(input_ids=_prompts(BATCH), sampling_params=_params())
    found.seen["one_engine_alone_seconds"] = time.perf_counter() - started


def _prompts(count: int) -> list[list[int]]:
    return [[48 + i % 10, 43, 49 + i % 9, 61] for i in range(count)]


def _params() -> dict[str, Any]:
    return {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}


def step(pool: EnginePool, found: Finding) -> None:
    """Where a step's time goes on the first engine: `enginepool doctor --profile` of the toy."""
    found.seen |= profile(pool, requests=BATCH, tokens=64)


def idle(pool: EnginePool, found: Finding) -> None:
    """The cost of the open pool while it is idle."""
    percent = idle_cpu_percent(_IDLE_SECONDS)
    found.seen["cpu_percent_of_a_core"] = percent
    found.expect(
        percent <= _IDLE_PERCENT, f"{percent:.1f} % of a core; {_IDLE_PERCENT:g} is allowed"
    )
