"""The line that a terminal shows while a pool opens."""

from __future__ import annotations

from collections.abc import Sequence

from enginepool.engine.start_stages import StartStages
from enginepool.engine.worker import EngineWorker

_WORDS = {
    "patches": "applies patches",
    "checkpoint": "looks at the checkpoint",
    "engines": "starts engines",
    "front_end": "loads the tokenizer",
    "import": "imports sglang-jax",
    "build": "is built",
    "read_weights": "reads weights",
    "check": "is checked",
    "warm_up": "warms up",
}


def describe_opening(
    name: str, stages: StartStages, workers: Sequence[EngineWorker], seconds: float
) -> str:
    """Describe the stage of a pool's opening, which began this many seconds ago."""
    worker = next((each for each in workers if not each.warm.done()), None)
    if worker is None or (now := worker.assembly.start.now) is None:
        return f"{name} {_WORDS.get(stages.now or '', 'opens')}, {seconds:.0f} s"
    engine, start = f"engine {worker.index + 1} of {len(workers)}", worker.assembly.start
    doing = _WORDS[now]
    if now == "warm_up" and start.bucket:
        doing = f"compiles {start.bucket} of {start.buckets}"
    return f"{name}: {engine} {doing}, {seconds:.0f} s"
