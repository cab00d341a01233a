"""Pools on many hosts, under Ray, used as one.

    ray.init(...)
    with RayEnginePool("Qwen/Qwen3-4B", hosts=4, devices_per_host=4) as pool:
        outputs = pool.generate_all(prompts, {"max_new_tokens": 256})

An adapter: it uses the public API, and `EnginePool._prepared`. It needs the extra `ray` when a pool
is made.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginepool.ray.pool import RayEnginePool

__all__ = ["RayEnginePool"]


# Any, not object: where Ray is not installed, type checkers resolve `import ray` to this package.
def __getattr__(name: str) -> Any:
    if name == "RayEnginePool":
        from enginepool.ray.pool import RayEnginePool

        return RayEnginePool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
