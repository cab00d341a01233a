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
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

_ALONE = {"process_count": 1, "process_index": 0}

_threads: dict[int, int] = {}
_originals: dict[str, Callable[..., int]] = {}
_lock = threading.Lock()


@contextmanager
def alone() -> Iterator[None]:
    """To what this thread calls, JAX runs in one process: this one.

    Threads may overlap: the first one in installs, the last one out restores.
    """
    thread = threading.get_ident()
    with _lock:
        if not _threads:
            for name, answer in _ALONE.items():
                _originals[name] = getattr(jax, name)
                setattr(jax, name, _answering(_originals[name], answer))
        _threads[thread] = _threads.get(thread, 0) + 1
    try:
        yield
    finally:
        with _lock:
            _threads[thread] -= 1
            if not _threads[thread]:
                del _threads[thread]
            if not _threads:
                for name in _ALONE:
                    setattr(jax, name, _originals.pop(name))


def _answering(original: Callable[..., int], answer: int) -> Callable[..., int]:
    @functools.wraps(original)
    def function(*args: object, **kwargs: object) -> int:
        if threading.get_ident() in _threads:
            return answer
        return original(*args, **kwargs)

    return function
