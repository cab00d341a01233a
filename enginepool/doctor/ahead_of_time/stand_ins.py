"""Replaces functions of JAX and upstream while upstream builds and warms up an engine on absent
chips. Upstream's code is not edited, and every function is put back.

| replaced | why |
| --- | --- |
| `jax.jit` | a program that upstream or the pool makes is compiled for the chip, and not run |
| `jax.make_array_from_callback`, `jax.device_put` | arrays have a shape and a place, no numbers |
| `jax.numpy.zeros`, `jax.sharding.reshard` | upstream makes scales of experts outside of programs |
| `jax.device_get` | results of programs are zeros |
| `jax.devices`, `jax.local_devices`, `jax.default_backend` | upstream and Pallas ask for the chip |
| `jax.default_device` | computations outside of programs run on the CPU |
| an entry in JAX's table of array types | JAX takes such an array for one of its own |
| `jax_utils._IS_TPU_RUNTIME_CACHED` | upstream asks once per process |
| `ModelRunner.get_available_device_memory` | the chip's memory is a number in `sizing/chips.py` |

Programs that a module makes when it is imported (upstream's kernels) are traced inside the others,
and stay as they are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from enginepool.doctor.ahead_of_time.record import Record


class AbstractArray(jax.Array):
    """An array without its numbers. Compiling a program needs no more."""

    __slots__ = ("_dtype", "_shape", "_sharding")

    def __init__(self, shape: Sequence[int], dtype: Any, sharding: Any) -> None:
        self._shape = tuple(shape)
        self._dtype = jax.dtypes.canonicalize_dtype(dtype)
        self._sharding = sharding

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> Any:
        return self._dtype

    @property
    def sharding(self) -> Any:
        return self._sharding

    @property
    def ndim(self) -> int:
        return len(self._shape)

    @property
    def size(self) -> int:
        return math.prod(self._shape)

    @property
    def nbytes(self) -> int:
        return self.size * self._dtype.itemsize

    @property
    def weak_type(self) -> bool:
        return False

    @property
    def committed(self) -> bool:
        return True

    @property
    def aval(self) -> Any:
        return jax.typeof(jax.ShapeDtypeStruct(self._shape, self._dtype, sharding=self._sharding))

    def devices(self) -> set[Any]:
        return self._sharding.device_set

    def is_deleted(self) -> bool:
        return False

    def block_until_ready(self) -> AbstractArray:
        return self

    def is_ready(self) -> bool:
        return True

    def copy_to_host_async(self) -> None: ...

    def __array__(
        self, dtype: Any = None, context: Any = None, copy: bool | None = None
    ) -> np.ndarray:
        """Zeros, in place of a program's result."""
        return np.zeros(self._shape, self._dtype if dtype is None else dtype)

    def __len__(self) -> int:
        return self._shape[0]

    def __repr__(self) -> str:
        return f"<AbstractArray {self._dtype}{list(self._shape)}>"


class _Program:
    """Replaces a jitted function."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], record: Record):
        self._jitted = _jit(function, **options)
        self.__wrapped__ = function
        self._out_shardings = options.get("out_shardings")
        self._record = record
        self._made: dict[Any, tuple[list[Any], Any]] = {}
        named = getattr(function, "func", function)  # of a partial
        self._name = getattr(named, "__name__", type(named).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _traced((args, kwargs)):
            return self._jitted(*args, **kwargs)
        signature = _signature((args, kwargs))
        if signature not in self._made:
            lowered = self.lower(*args, **kwargs)
            lowered.compile()
            self._made[signature] = jax.tree.flatten(lowered.program.out_info)
        outs, form = self._made[signature]
        results = (
            AbstractArray(out.shape, out.dtype, self._out_shardings or out.sharding) for out in outs
        )
        return jax.tree.unflatten(form, results)

    def lower(self, *args: Any, **kwargs: Any) -> _Lowered:
        started = time.process_time()
        try:
            lowered = self._jitted.lower(*args, **kwargs)
        except Exception as error:
            self._record.not_lowered(self._name, args, error)
            raise
        seconds = time.process_time() - started
        return _Lowered(lowered, lambda: self._record.compile(self._name, lowered, args, seconds))


@dataclass(frozen=True)
class _Lowered:
    program: Any
    compile: Callable[[], None]


_jit = jax.jit
_device_put = jax.device_put
_device_get = jax.device_get
_jnp_zeros = jnp.zeros
_shard = jax.sharding.reshard
_on_device = (AbstractArray, jax.ShapeDtypeStruct)


def _traced(tree: Any) -> bool:
    """Whether the call is inside another program."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def _signature(tree: Any) -> Any:
    """The properties of arguments that distinguish the programs that JAX makes of one function."""
    leaves, form = jax.tree.flatten(tree)
    return form, tuple(map(_kind, leaves))


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, (int, float)):
        return type(leaf)  # no static argument of this type differs between steps
    if hasattr(leaf, "dtype"):
        return tuple(leaf.shape), leaf.dtype, getattr(leaf, "sharding", None)
    return leaf


def _put(value: Any, device: Any = None, **options: Any) -> Any:
    if isinstance(device, list):  # one for each
        return [_put(one, where, **options) for one, where in zip(value, device, strict=True)]
    sharding = SingleDeviceSharding(device) if isinstance(device, jax.Device) else device
    platforms = {each.platform for each in getattr(sharding, "device_set", ())}
    if platforms != {"tpu"} or _traced(value):
        return _device_put(value, device, **options)
    return jax.tree.map(lambda leaf: _like(leaf, sharding), value)


def _like(leaf: Any, sharding: Any) -> AbstractArray:
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return AbstractArray(leaf.shape, leaf.dtype, sharding)


def _get(value: Any) -> Any:
    zeros = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, _on_device) else leaf,
        value,
    )
    return _device_get(zeros)


def _from_callback(shape: Any, sharding: Any, callback: Any, dtype: Any = None) -> AbstractArray:
    if dtype is None:
        dtype = callback(tuple(slice(0, 1) for _ in shape)).dtype
    return AbstractArray(shape, dtype, sharding)


@wraps(_jnp_zeros)  # the name of a program that makes zeros
def _zeros(shape: Any, dtype: Any = None, *, out_sharding: Any = None, **options: Any) -> Any:
    from jax._src import core

    if not (core.trace_state_clean() and isinstance(out_sharding, PartitionSpec)):
        return _jnp_zeros(shape, dtype, out_sharding=out_sharding, **options)
    return AbstractArray(shape, dtype, NamedSharding(jax.sharding.get_mesh(), out_sharding))


def _reshard(value: Any, sharding: Any) -> Any:
    return _like(value, sharding) if isinstance(value, AbstractArray) else _shard(value, sharding)


def _free_memory(hbm_bytes: int) -> Callable[[Any], int]:
    """The free memory, which upstream asks for before it loads the model and when it sizes the KV
    cache."""

    def free_memory(runner: Any) -> int:
        model = getattr(runner, "model", None)
        leaves = jax.tree.leaves(nnx.state(model)) if model is not None else []
        # A chip has one shard of each.
        return hbm_bytes - sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in leaves
        )

    return free_memory


@contextmanager
def upstream_without_device(
    devices: Sequence[Any], hbm_bytes: int, record: Record
) -> Iterator[None]:
    """Let an engine be built and warmed up on these chips. This holds for the whole process, so no
    other code of it may use JAX meanwhile.

    Args:
        record: Gets every program that is made.
    """
    from jax._src import core
    from sgl_jax.srt.model_executor.model_runner import ModelRunner
    from sgl_jax.srt.utils import jax_utils

    def jit(function: Any = None, **options: Any) -> Any:
        if function is None:
            return lambda later: jit(later, **options)
        # The function belongs to a module that is being imported. The module stays after the block,
        # so it needs the original `jit`.
        if "<locals>" not in getattr(function, "__qualname__", "<locals>"):
            return _jit(function, **options)
        return _Program(function, options, record)

    with ExitStack() as stack:
        types = {AbstractArray: lambda array: array.aval}
        stack.enter_context(mock.patch.dict(core.pytype_aval_mappings, types))
        for holder, name, stand_in in (
            (jax, "jit", jit),
            (jax, "make_array_from_callback", _from_callback),
            (jax, "device_put", _put),
            (jnp, "zeros", _zeros),
            (jax.sharding, "reshard", _reshard),
            (jax, "device_get", _get),
            (jax, "devices", lambda *_: list(devices)),
            (jax, "local_devices", lambda *_, **__: list(devices)),
            (jax, "default_backend", lambda: "tpu"),
            (jax, "default_device", lambda _: nullcontext()),
            (jax_utils, "_IS_TPU_RUNTIME_CACHED", True),
            (ModelRunner, "get_available_device_memory", _free_memory(hbm_bytes)),
        ):
            stack.enter_context(mock.patch.object(holder, name, stand_in))
        yield
