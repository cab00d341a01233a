"""The model and the requests of `benchmarks.device`."""

from __future__ import annotations

import random
from typing import Any

from scripts.train_toy.checkpoint import CONFIG

BATCH, SMALL_BATCH = 64, 4
WORKLOADS = ("decode", "sampled", "arrivals")
_QWEN3_06B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
}


def model_config(*, small: bool) -> dict[str, Any]:
    """Qwen3-0.6B's shape, or the toy's."""
    return CONFIG | ({"torch_dtype": "bfloat16"} if small else _QWEN3_06B)


def options(*, small: bool) -> dict[str, Any]:
    """`ServerArgs` for the pool and for upstream: one batch size, one size of prefill."""
    batch, prefill, context = (SMALL_BATCH, 64, 64) if small else (BATCH, 2048, 1024)
    return {
        "dtype": "bfloat16",
        "context_length": context,
        "max_total_tokens": batch * context,
        "max_running_requests": batch,
        "max_prefill_tokens": prefill,
        "chunked_prefill_size": prefill,
        "precompile_bs_paddings": [batch],
        "precompile_token_paddings": [prefill],
    }


def requests(
    kind: str, vocab_size: int, engines: int, *, small: bool
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Prompts and parameters. "arrivals" has three times what the batches hold, uneven."""
    rng = random.Random(7)
    batch, prompt, output = (SMALL_BATCH, 8, 16) if small else (BATCH, 128, 256)
    count = engines * batch * (3 if kind == "arrivals" else 1)
    uneven = kind == "arrivals"
    prompts = [
        [rng.randrange(vocab_size) for _ in range(rng.randint(4, 2 * prompt) if uneven else prompt)]
        for _ in range(count)
    ]
    params = [
        {
            "temperature": 0.0 if kind == "decode" else 1.0,
            "max_new_tokens": rng.randint(output // 8, output) if uneven else output,
            "ignore_eos": True,
        }
        for _ in prompts
    ]
    return prompts, params
