"""A pool of micro engines that holds many requests: two models, and options that keep it tight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.synthetic import micro_config, write_model

# In tokens: a prefix that many prompts share, the longest prompt after it, the longest output.
SHARED, PROMPT, OUTPUT = 32, 24, 32


def two_models(folder: Path) -> list[Path]:
    """Checkpoints of one shape and other weights."""
    return [
        write_model(folder / str(which), micro_config(), seed=which, std=0.15) for which in range(2)
    ]


def server_args(slots: int) -> dict[str, Any]:
    """Options of an engine for so many requests at a time."""
    return {
        "dtype": "float32",
        "context_length": 256,
        "max_running_requests": slots,
        # Nearly all at full length: now and then an engine runs out, and retracts by itself.
        "max_total_tokens": max(256, slots * (SHARED + PROMPT + OUTPUT) * 3 // 4),
        "max_prefill_tokens": 64,
        "chunked_prefill_size": 64,
        "precompile_token_paddings": [64],
        "precompile_bs_paddings": [slots],
    }


def at_rest(stats: dict[str, Any]) -> bool:
    """Whether every engine serves, nothing waits, nothing runs and no KV cache is in use."""
    return not stats["waiting"] and all(
        engine["state"] == "serving" and not engine["running"] and not engine["kv_used_tokens"]
        for engine in stats["engines"]
    )
