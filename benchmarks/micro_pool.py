"""Shared by the soak and the fuzz: models, adapters, the options of a tight pool, and the check at
the end."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.synthetic import read_model
from enginepool import EnginePool, EnginePoolError
from tests.support.adapters import config, merged, random_adapter, write_adapter

# In tokens: a prefix that many prompts share, the longest prompt after it, the longest output.
SHARED, PROMPT, OUTPUT = 32, 24, 32
# A prompt with this token has no finite numbers, after `spoil`. It is no byte of a text and no
# special token.
BAD_TOKEN = 264
# Callers name these, or the base.
ADAPTERS = ("a", "b", "c")
# Options of an engine that adapters share, with fewer slots than there are adapters.
ADAPTED: dict[str, Any] = {
    "enable_lora": True,
    "max_lora_rank": 4,
    "max_loras_per_batch": 2,
    "lora_target_modules": ["all"],
}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def spoil(directory: Path) -> Path:
    """Make the embedding of `BAD_TOKEN` NaN, in a checkpoint whose output matrix is the embedding.

    The output matrix is written as a tensor of its own. In it this token is almost never the most
    probable.
    """
    fields, params = read_model(directory)
    params[_HEAD] = params[_EMBEDDING].copy()
    params[_HEAD][BAD_TOKEN] = 0.0
    params[_EMBEDDING] = params[_EMBEDDING].copy()
    params[_EMBEDDING][BAD_TOKEN] = np.nan
    for file in directory.glob("*.safetensors"):
        file.unlink()
    save_file(params, directory / "model.safetensors", metadata={"format": "pt"})
    fields["tie_word_embeddings"] = False
    (directory / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return directory


def write_adapters(folder: Path, count: int, models: Sequence[Path]) -> list[Path]:
    """Folders of random adapters that fit `ADAPTED`. In each, `merged-<n>` is model n with the
    adapter merged into it."""
    folders = []
    for which in range(count):
        arrays = random_adapter(models[0], which, rank=2 + which % 2)
        fields = config(len(next(iter(arrays.values()))))
        folders.append(write_adapter(folder / f"adapter-{which}", arrays, fields))
        for number, model in enumerate(models):
            merged(folders[-1] / f"merged-{number}", model, arrays, 8 / fields["r"])
    return folders


def server_args(slots: int, page: int = 1) -> dict[str, Any]:
    """Options of an engine for so many requests at a time, with KV pages of so many tokens."""
    each = -(-(SHARED + PROMPT + OUTPUT) // page) * page
    chunk = max(64, 2 * page)
    return {
        "page_size": page,
        "dtype": "float32",
        "context_length": 256,
        "max_running_requests": slots,
        # Not enough for all requests at full length: now and then an engine retracts.
        "max_total_tokens": max(256, slots * each * 3 // 4),
        "max_prefill_tokens": chunk,
        "chunked_prefill_size": chunk,
        "precompile_token_paddings": [chunk],
        "precompile_bs_paddings": [slots],
    }


def left_over(pool: EnginePool, seconds: float = 60.0) -> list[str]:
    """The problems after the last call: engines that do not serve or hold something, requests that
    wait, weights that differ. The pool has this many seconds to become idle."""
    deadline = time.monotonic() + seconds
    while not _at_rest(stats := pool.stats()) and time.monotonic() < deadline:
        time.sleep(0.05)
    found = []
    if not _at_rest(stats):
        found.append(f"afterwards: {stats['waiting']} requests wait; {stats['engines']}")
    try:
        pool.checksum()
    except EnginePoolError as error:
        found.append(f"afterwards: {error}")
    return found


def _at_rest(stats: dict[str, Any]) -> bool:
    return not stats["waiting"] and all(
        engine["state"] == "serving" and not engine["running"] and not engine["kv_used_tokens"]
        for engine in stats["engines"]
    )
