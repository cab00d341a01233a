"""What the tests share: options, types, a comparison."""

from collections.abc import Callable
from typing import Any

import pytest

from enginepool import EnginePool

# Few shapes and little KV: a pool opens in seconds. A prompt past 64 tokens is prefilled in chunks,
# and four long requests do not fit one engine's KV cache at the same time.
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "context_length": 512,
    "max_running_requests": 4,
    "max_total_tokens": 1024,
    "max_prefill_tokens": 64,
    "chunked_prefill_size": 64,
    "precompile_token_paddings": [64],
    "precompile_bs_paddings": [4],
}

MakePool = Callable[..., EnginePool]


def same(results: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Equal ids, and log-probabilities within 1e-4."""
    for result, other in zip(results, expected, strict=True):
        assert result["output_ids"] == other["output_ids"]
        assert result["meta_info"]["finish_reason"] == other["meta_info"]["finish_reason"]
        got, want = (
            [entry[0] for entry in one["meta_info"]["output_token_logprobs"]]
            for one in (result, other)
        )
        assert got == pytest.approx(want, abs=1e-4)
