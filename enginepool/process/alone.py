"""In a JAX program of several processes: an engine of this process's devices concerns no other.

What breaks: Building an engine waits for every process of the program to build one too; so does
building one anew after a failure, which the others have no part in.
Why: Upstream looks at the program and not at its mesh. With `jax.process_count()` above 1 it takes
the least free memory of all processes, and has process 0 read a checkpoint's index for all.
Remove when: Upstream asks whether its mesh spans processes. Then nothing here is called any more.

Nothing of upstream is touched: the two public functions that it asks answer this thread as if its
process were the only one. JAX itself asks others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from enginepool.process.some_threads import SomeThreads

_ALONE = {"process_count": 1, "process_index": 0}


def _install() -> Callable[[], None]:
    originals = {name: getattr(jax, name) for name in _ALONE}
    for name, answer in _ALONE.items():
        setattr(jax, name, _answering(originals[name], answer))

    def restore() -> None:
        for name, original in originals.items():
            setattr(jax, name, original)

    return restore


def _answering(original: Callable[..., int], answer: int) -> Callable[..., int]:
    @functools.wraps(original)
    def function(*args: object, **kwargs: object) -> int:
        return answer if _threads.here else original(*args, **kwargs)

    return function


_threads = SomeThreads(_install)

# To what a thread calls inside, JAX runs in one process: this one.
alone = _threads.inside
