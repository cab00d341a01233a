"""A pool of micro engines that holds many requests: two models, and options that keep it tight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.merges import write_speller
from benchmarks.synthetic import micro_config

# In tokens: a prefix that many prompts share, the longest prompt after it, the longest output.
SHARED, PROMPT, OUTPUT = 32, 24, 32


def two_models(folder: Path) -> list[Path]:
    """Checkpoints of one shape and other weights, whose tokenizer merges what they spell."""
    return [write_speller(folder / str(which), micro_config(), seed=which) for which in range(2)]


def server_args(slots: int, page: int = 1) -> dict[str, Any]:
    """Options of an engine for so many requests at a time, with KV pages of so many tokens."""
    each = -(-(SHARED + PROMPT + OUTPUT) // page) * page
    chunk = max(64, 2 * page)
    return {
        "page_size": page,
        "dtype": "float32",
        "context_length": 256,
        "max_running_requests": slots,
        # Nearly all at full length: now and then an engine runs out, and retracts by itself.
        "max_total_tokens": max(256, slots * each * 3 // 4),
        "max_prefill_tokens": chunk,
        "chunked_prefill_size": chunk,
        "precompile_token_paddings": [chunk],
        "precompile_bs_paddings": [slots],
    }


@contextmanager
def chunks_beside_others() -> Iterator[set[str]]:
    """The prompts that are prefilled in chunks, meanwhile, on engines where others decode; for
    after a pool was opened."""
    from enginepool.engine import scheduler as module
    from enginepool.engine.scoring import running_count

    seen: set[str] = set()
    owner: Any = module.PinnedScheduler
    original = owner.get_new_batch_prefill

    def noting(scheduler: Any) -> Any:
        batch = original(scheduler)
        if running_count(scheduler):
            seen.update(req.rid for req in scheduler.chunked_reqs if req is not None)
        return batch

    owner.get_new_batch_prefill = noting
    try:
        yield seen
    finally:
        owner.get_new_batch_prefill = original


def at_rest(stats: dict[str, Any]) -> bool:
    """Whether every engine serves, nothing waits, nothing runs and no KV cache is in use."""
    return not stats["waiting"] and all(
        engine["state"] == "serving" and not engine["running"] and not engine["kv_used_tokens"]
        for engine in stats["engines"]
    )
