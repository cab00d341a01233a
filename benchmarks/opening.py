"""Opens what benchmarks compare: a pool, and upstream's Engine with the same options."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import jax

import patches
from enginepool import EnginePool
from enginepool.config import PoolConfig

_FIRST: dict[str, Any] = {"input_ids": [[1, 2, 3]], "sampling_params": {"max_new_tokens": 1}}


def import_upstream() -> None:
    """Import upstream's Engine, without the side effects of the import. No platform is started."""
    applied = patches.apply()
    import sgl_jax.srt.entrypoints.engine  # noqa: F401

    patches.revert(applied)


def first_token(
    model: str, devices: int | None, **options: Any
) -> tuple[EnginePool, dict[str, Any]]:
    """Open a pool and generate one token. Returns the pool, and the seconds from its constructor to
    the token, in all and by part."""
    import_upstream()
    started = time.perf_counter()
    pool = EnginePool(model, devices=devices, **options).open()
    pool.generate_all(**_FIRST)
    seconds, stats = time.perf_counter() - started, pool.stats()
    return pool, {
        "seconds": seconds,
        "start": stats["start"],
        "build": [engine["build_seconds"] for engine in stats["engines"]],
        "warmup": [engine["warmup_seconds"] for engine in stats["engines"]],
        "programs": stats["executables"]["compiled"],
    }


def upstreams_first_token(
    model: str, server_args: Mapping[str, Any], platform: str | None = None, **changes: Any
) -> tuple[Any, dict[str, Any]]:
    """The same for upstream's Engine, without the parts."""
    import_upstream()
    started = time.perf_counter()
    engine = upstreams_engine(model, server_args, platform, **changes)
    engine.generate(**_FIRST)
    return engine, {"seconds": time.perf_counter() - started}


def upstreams_engine(
    model: str, server_args: Mapping[str, Any], platform: str | None = None, **changes: Any
) -> Any:
    """Upstream's Engine on the first device. It compiles by itself and has overlap scheduling on.

    Args:
        platform: Its name in JAX. If it is None, JAX is started and asked. This process then holds
            the device, and an Engine in processes of its own cannot get it.
        changes: Changes of the options that a pool gives its engines.
    """
    from sgl_jax.srt.entrypoints.engine import Engine

    platform = platform or jax.default_backend()
    args = PoolConfig(model, server_args=dict(server_args)).for_engine(platform, [0])
    own = {"disable_precompile": False, "disable_overlap_schedule": False}
    return Engine(**args | own | changes)
