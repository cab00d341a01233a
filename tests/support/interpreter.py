"""Upstream's TPU attention on CPU: its FlashAttention backend in Pallas' TPU interpreter.

`flash_attention()` supplies what CPU and the interpreter of JAX 0.10 lack. Each function says why.
The kernel itself, its block sizes and its metadata are upstream's, unchanged. Imports sgl_jax
inside functions only, because patches must come first where pools are tested.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import shared_memory
from jax._src.pallas.mosaic.interpret import utils as interpreter_utils
from jax._src.state.indexing import NDIndexer
from jax._src.state.types import BitcastTransform, ReshapeTransform
from jax.experimental.pallas import tpu as pltpu

Transforms = tuple[Any, ...]
# A v5e's block sizes come from upstream's formula, because its table of tuned sizes has no v5.
TPU_VERSION = 5


@contextmanager
def flash_attention() -> Iterator[None]:
    """Inside the block, pools that are opened with `attention_backend="fa"` run the TPU's kernel.

    This holds for the whole process: engines have their own threads, which the interpreter's switch
    for one thread would not reach.
    """
    with pytest.MonkeyPatch.context() as patch:
        _pretend_tpu(patch)
        _teach_views(patch)
        _number_devices(patch)
        _one_step_at_a_time(patch)
        pltpu.set_tpu_interpret_mode(pltpu.InterpretParams())
        try:
            yield
        finally:
            pltpu.set_tpu_interpret_mode(None)


def _pretend_tpu(patch: pytest.MonkeyPatch) -> None:
    """The TPU version that the kernel asks its device for, and the backend that upstream would
    choose.

    Upstream uses native attention if `ServerArgs.device` is cpu. So it is tpu for this one
    decision, and only for it, because elsewhere it would be compared with JAX's platform.
    """
    from sgl_jax.srt.kernels.ragged_paged_attention import (
        ragged_paged_attention_v3,
        tuned_block_sizes_v3,
        util,
    )
    from sgl_jax.srt.model_executor.model_runner import ModelRunner

    for module in (ragged_paged_attention_v3, tuned_block_sizes_v3, util):
        patch.setattr(module, "get_tpu_version", lambda: TPU_VERSION)
    choose = ModelRunner._get_attention_backend

    def as_on_tpu(self: Any) -> Any:
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(self.server_args, "device", "tpu")
            return choose(self)

    patch.setattr(ModelRunner, "_get_attention_backend", as_on_tpu)


# Views of a buffer


class _ViewRange(tuple):
    """The part of a view that is read or written, and how the view comes from its buffer."""

    view: Transforms


def _teach_views(patch: pytest.MonkeyPatch) -> None:
    """Supports references that were bitcast or reshaped.

    The interpreter knows indices only (`'BitcastTransform' object has no attribute 'indices'`). The
    kernel's loads and stores go through `ref.bitcast(uint32).at[i].reshape(rows, 128)[ds]`.
    Everything up to the last bitcast or reshape is a view, which is a buffer here for the duration
    of the access. The rest are indices, which the interpreter resolves and checks as usual.
    """
    to_range = interpreter_utils.to_range

    def to_view_range(transforms: Transforms) -> tuple[slice | int, ...]:
        own = [i for i, one in enumerate(transforms) if not isinstance(one, NDIndexer)]
        if not own:
            return to_range(transforms)
        result = _ViewRange(to_range(transforms[own[-1] + 1 :]))
        result.view = tuple(transforms[: own[-1] + 1])
        return result

    patch.setattr(interpreter_utils, "to_range", to_view_range)
    memory = shared_memory.SharedMemory
    for name in ("get", "store", "swap"):
        access = getattr(memory, f"{name}_buffer_content")
        through = _through_view(access, writes=name != "get")
        patch.setattr(memory, access.__name__, through)


def _through_view(access: Callable[..., Any], *, writes: bool) -> Callable[..., Any]:
    @functools.wraps(access)
    def through(self: Any, key: Any, rnge: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(rnge, _ViewRange):
            return access(self, key, rnge, *args, **options)
        content = self.mem[key].content
        seen, place = _look(content, rnge.view), object()
        self.mem[place] = shared_memory.Buffer(seen)
        try:
            result = access(self, place, tuple(rnge), *args, **options)
        finally:
            del self.mem[place]
        if writes:
            _put_back(content, rnge.view, seen)
        return result

    return through


def _look(content: np.ndarray, view: Transforms) -> np.ndarray:
    for transform in view:
        content = _step(content, transform)
    return content


def _put_back(content: np.ndarray, view: Transforms, value: np.ndarray) -> None:
    """Make `content` such that its view is `value`."""
    first, *rest = view
    part = _step(content, first)
    if rest:
        _put_back(part, tuple(rest), value)
    else:
        part[...] = value
    if isinstance(first, BitcastTransform):
        content[...] = _bitcast(part, content.dtype)
    elif isinstance(first, ReshapeTransform):
        content[...] = part.reshape(content.shape)


def _step(content: np.ndarray, transform: Any) -> np.ndarray:
    match transform:
        case NDIndexer():
            return content[interpreter_utils.to_range([transform])]
        case BitcastTransform():
            return _bitcast(content, np.dtype(transform.dtype))
        case ReshapeTransform():
            return content.reshape(transform.shape)
    raise NotImplementedError(f"a reference transformed by {transform}")


def _bitcast(content: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """As a TPU packs them: a 32-bit element has one column of several narrower rows."""
    *outer, rows, columns = content.shape
    old, new = content.dtype.itemsize, dtype.itemsize
    if new > old:
        narrow = content.reshape(*outer, rows * old // new, new // old, columns)
        together = np.ascontiguousarray(narrow.swapaxes(-1, -2))
        return together.view(dtype)[..., 0]
    if new < old:
        apart = np.ascontiguousarray(content)[..., None].view(dtype).swapaxes(-1, -2)
        return apart.reshape(*outer, rows * old // new, columns)
    return np.ascontiguousarray(content).view(dtype)


# Several engines


def _number_devices(patch: pytest.MonkeyPatch) -> None:
    """Turns the device's number within the engine's mesh into a Python number.

    The interpreter multiplies it as it comes: a JAX array on the process's first device, on the
    engine's thread, where JAX has the engine's mesh. On any other device this fails with `Received
    incompatible devices for jitted computation`.
    """
    memory = shared_memory.SharedMemory
    update = memory.update_clocks_for_device_barrier
    patch.setattr(memory, update.__name__, lambda self, device_id: update(self, int(device_id)))


def _one_step_at_a_time(patch: pytest.MonkeyPatch) -> None:
    """The interpreter has one memory for the process, and the first kernel that ends removes it.

    The steps of two engines at once fail with `assert _shared_memory is not None` or with a
    semaphore's KeyError. So a program with kernels begins when the one before has its results.
    Everything else of two engines runs at once.
    """
    from sgl_jax.srt.model_executor.model_runner import ModelRunner

    from enginepool.engine.steady.prefill_step import PrefillStep
    from enginepool.engine.steady.program import StepProgram

    turn = threading.Lock()

    def alone(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def in_turn(*args: Any, **options: Any) -> Any:
            with turn:
                return jax.block_until_ready(step(*args, **options))

        return in_turn

    patch.setattr(ModelRunner, "forward", alone(ModelRunner.forward))
    patch.setattr(StepProgram, "step", alone(StepProgram.step))
    patch.setattr(PrefillStep, "launch", alone(PrefillStep.launch))
