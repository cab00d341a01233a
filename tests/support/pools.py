"""Options, types, comparisons, and counts of compilations and memory, which tests share."""

import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest

from enginepool import EnginePool
from enginepool.config import PoolConfig
from enginepool.engine.executable_cache import ExecutableCache
from enginepool.runtime.runtime import Runtime
from patches._lookup import module

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

# On CPU older versions support pages of one token only.
_NATIVE = module("sgl_jax.srt.layers.attention.native_backend").forward_attention
NATIVE_PAGES = "page_size" in inspect.signature(_NATIVE).parameters

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


def open_with(patch: pytest.MonkeyPatch, cache: ExecutableCache | None) -> None:
    """From now on pools use this cache, or each its own. They do not compile ahead for swaps, so
    that tests know who compiles, and run faster."""

    def make_runtime(config: PoolConfig, name: str) -> Runtime:
        runtime = Runtime(config, name, cache)
        runtime.swap_programs.stop()
        return runtime

    patch.setattr(EnginePool, "make_runtime", staticmethod(make_runtime))


COMPILED = "/jax/core/compile/backend_compile_duration"


@contextmanager
def compilations() -> Iterator[list[float]]:
    """Counts the programs that are compiled or loaded inside the block, on any thread and for
    any device."""
    seen: list[float] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == COMPILED:
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def in_use(pool: EnginePool) -> int:
    """Bytes of live arrays, without those that other tests left to the garbage collector. Waits
    until engines have dropped the arrays of their last step, which happens after a result."""
    pool.pause_generation("in_place")
    pool.continue_generation()
    gc.collect()
    return pool.stats()["memory"]["sum"]["bytes_in_use"]
