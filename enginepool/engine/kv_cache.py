"""An engine's KV cache as device memory: its buffers are freed, and allocated again.

Unless the user decides its size, `sizing/kv_size.py` does on a TPU, `config.py` on a CPU, and
upstream on a GPU.

Reaches into upstream's memory pools, which hold the buffers (`model_runner.memory_pools`). Every
other part refers to these pools, so the pools stay and only their buffers change.

What breaks: A KV cache can neither be freed and allocated again, nor be replaced after a failed
step that consumed its buffers.
Why: Upstream makes the buffers once, in the constructors of its pools.
Remove when: Upstream's pools release and resume their memory. Pools without buffers are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from enginepool.errors import EnginePoolError
from enginepool.process.upstream import expect

if TYPE_CHECKING:
    from sgl_jax.srt.model_executor.model_runner import ModelRunner

_POOLS = "sgl_jax.srt.mem_cache"


class KVCache:
    """The KV buffers of one engine. Used on its thread, while no request runs."""

    def __init__(self, model_runner: ModelRunner) -> None:
        expect(model_runner, "memory_pools", "token_to_kv_pool")
        expect(model_runner.memory_pools, "_pools")
        self._runner = model_runner
        self._dropped: list[tuple[Any, Any, jax.ShapeDtypeStruct]] = []
        self._zeros: dict[Any, jax.stages.Compiled] = {}
        self._count = len(list(self._buffers()))
        if not self._count:
            raise EnginePoolError("this sglang-jax keeps its KV cache elsewhere: found no buffers")

    @property
    def dropped(self) -> bool:
        return bool(self._dropped)

    def describe(self) -> dict[str, Any]:
        """Describe the buffers. If they are dropped, describe them as they were before."""
        specs = [spec for *_, spec in self._dropped] or [spec_of(b) for *_, b in self._buffers()]
        return {
            "kv_pool_type": type(self._runner.token_to_kv_pool).__name__,
            "layer_num": len(specs),
            "fused_buffer_shape": list(specs[0].shape),
            "dtype": str(specs[0].dtype),
            "fused_bytes_per_layer": _bytes(specs[0]),
            "fused_bytes_total": sum(map(_bytes, specs)),
        }

    def compile(self) -> None:
        """Compile what `rebuild` runs, so that nothing is compiled while serving."""
        for _, _, buffer in self._buffers():
            self._program(spec_of(buffer))

    def drop(self) -> int:
        """Free the buffers; returns their bytes, or 0 if they are dropped already. The prefix cache
        must be empty."""
        if self.dropped:
            return 0
        buffers = list(self._buffers())
        if len(buffers) != self._count:
            raise RuntimeError(f"{len(buffers)} of {self._count} KV buffers are left")
        for container, key, buffer in buffers:
            self._dropped.append((container, key, spec_of(buffer)))
            _put(container, key, None)
            buffer.delete()
        return sum(_bytes(spec) for _, _, spec in self._dropped)

    def renew(self) -> None:
        """Fill every buffer with zeros, even if a failed step has consumed the old one."""
        if not self.dropped:
            self.drop()
            self.rebuild()

    def rebuild(self) -> int:
        """Allocate the buffers again, filled with zeros; returns their bytes."""
        made = [(container, key, self._program(spec)()) for container, key, spec in self._dropped]
        jax.block_until_ready([buffer for *_, buffer in made])
        for container, key, buffer in made:
            _put(container, key, buffer)
        self._dropped = []
        return sum(buffer.nbytes for *_, buffer in made)

    def _program(self, spec: jax.ShapeDtypeStruct) -> jax.stages.Compiled:
        kind = (spec.shape, spec.dtype, spec.sharding)
        if kind not in self._zeros:
            make = jax.jit(partial(jnp.zeros, *kind[:2]), out_shardings=spec.sharding)
            self._zeros[kind] = make.lower().compile()
        return self._zeros[kind]

    def _buffers(self) -> Iterator[tuple[Any, Any, jax.Array]]:
        """Yield each device array of the pools, after its container and key."""
        seen: set[int] = set()
        todo: list[Any] = list(self._runner.memory_pools._pools.values())
        while todo:
            pool = todo.pop()
            if id(pool) in seen:
                continue
            seen.add(id(pool))
            for name, value in vars(pool).items():
                if isinstance(value, jax.Array):
                    yield pool, name, value
                elif isinstance(value, list):
                    for index, item in enumerate(value):
                        if isinstance(item, jax.Array):
                            yield value, index, item
                elif type(value).__module__.startswith(_POOLS) and hasattr(value, "__dict__"):
                    todo.append(value)


def _put(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, list):
        container[key] = value
    else:
        setattr(container, key, value)


def spec_of(buffer: jax.Array) -> jax.ShapeDtypeStruct:
    """The shape, dtype and sharding of a buffer."""
    return jax.ShapeDtypeStruct(buffer.shape, buffer.dtype, sharding=buffer.sharding)


def _bytes(spec: jax.ShapeDtypeStruct) -> int:
    return spec.size * spec.dtype.itemsize
