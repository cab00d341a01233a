"""What an engine multiplies matrices with: decided once, in effect on the engine's threads only.

What breaks: Without this the host's matrices are multiplied otherwise once a pool is open on a
GPU, or the engine's programs are traced with TF32: outputs and log-probabilities are not float32's.
Why: Upstream's model runner sets `jax_default_matmul_precision` for the whole process while it is
built, and most programs of an engine are traced later.
Remove when: Upstream asks for a precision where it multiplies.

`jax.config.update` is replaced while an engine is built, in effect on that thread alone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax

from enginepool.process.thread_override import ThreadOverride

_NAME = "jax_default_matmul_precision"

_thread = threading.local()


class MatmulPrecision:
    """The precision of one engine's matrix products, on every thread that traces for it.

    Attributes:
        value: As `jax.default_matmul_precision` takes it. At first what is in effect on the
            calling thread: the user's choice. Where that is None, upstream's for the platform
            once an engine is built; None then stands for JAX's default.
    """

    def __init__(self) -> None:
        self.value: str | None = getattr(jax.config, _NAME)

    @contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """What the calling thread traces in the block has this precision, whatever the host
        sets meanwhile."""
        with jax.default_matmul_precision(self.value):
            yield

    @contextmanager
    def building(self) -> Iterator[None]:
        """`on_this_thread` for the build of an engine: what upstream asks for is its choice for
        this engine, and not the process's."""
        with ExitStack() as block, _upstreams_choice.on_this_thread():
            block.enter_context(self.on_this_thread())
            _thread.choose = functools.partial(self._choose, block)
            yield

    def _choose(self, block: ExitStack, value: str | None) -> None:
        if self.value is None:
            self.value = value
            block.enter_context(self.on_this_thread())


def _replace_update() -> Callable[[], None]:
    original = jax.config.update

    def update(name: str, value: Any) -> None:
        if name == _NAME and _upstreams_choice.active:
            _thread.choose(value)
        else:
            original(name, value)

    jax.config.__dict__["update"] = update

    def restore() -> None:
        # A method of the class: without the instance's own it is found again.
        if vars(jax.config).get("update") is update:
            del jax.config.update

    return restore


_upstreams_choice = ThreadOverride(_replace_update)
