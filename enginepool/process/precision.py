"""The precision of an engine's matrix products: chosen once, and only on the engine's threads.

What breaks: Without this, an open pool on a GPU changes the precision of the host's own matrix
products. Or the engine's programs are traced with TF32, and outputs differ from float32.
Why: Upstream's model runner sets `jax_default_matmul_precision` for the whole process while it is
built. Most programs of an engine are traced later.
Remove when: Upstream asks for a precision where it multiplies.

`jax.config.update` is replaced while an engine is built, for that thread only.
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
        value: A value of `jax.default_matmul_precision`. It begins as the calling thread's, which
            is the user's choice. If that is None, the build sets upstream's choice for the
            platform. If that is None as well, JAX's default holds.
    """

    def __init__(self) -> None:
        self.value: str | None = getattr(jax.config, _NAME)

    @contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """A block in which the calling thread traces with this precision, even if the host sets
        another one meanwhile.
        """
        with jax.default_matmul_precision(self.value):
            yield

    @contextmanager
    def building(self) -> Iterator[None]:
        """`on_this_thread` for the build of an engine. Upstream's setting becomes this engine's
        precision, and not the process's.
        """
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

    def update(name: str, val: Any) -> None:  # JAX's own names, which a host may use
        if name == _NAME and _upstreams_choice.active:
            _thread.choose(val)
        else:
            original(name, val)

    jax.config.__dict__["update"] = update

    def restore() -> None:
        # Without the instance's attribute the class's method is found again.
        if vars(jax.config).get("update") is update:
            del jax.config.update

    return restore


_upstreams_choice = ThreadOverride(_replace_update)
