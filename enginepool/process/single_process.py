"""Builds an engine in a JAX program of several processes, as if there were only this process.

What breaks: Building an engine waits until every process of the program builds one too. So does
rebuilding an engine after a failure, although the other processes have no part in it.
Why: Upstream counts the processes of the program, not those of its mesh. With `jax.process_count()`
above 1 it takes the least free memory of all processes, and has process 0 read a checkpoint's index
for all.
Remove when: Upstream asks whether its mesh spans processes. Then nothing here is called any more.

Nothing of upstream is replaced. `jax.process_count()` and `jax.process_index()`, which upstream
calls, return 1 and 0 on one thread. JAX itself uses other functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from enginepool.process.thread_override import ThreadOverride

_SINGLE_PROCESS = {"process_count": 1, "process_index": 0}


def _install() -> Callable[[], None]:
    originals = {name: getattr(jax, name) for name in _SINGLE_PROCESS}
    for name, answer in _SINGLE_PROCESS.items():
        setattr(jax, name, _answering(originals[name], answer))

    def restore() -> None:
        for name, original in originals.items():
            setattr(jax, name, original)

    return restore


def _answering(original: Callable[..., int], answer: int) -> Callable[..., int]:
    @functools.wraps(original)
    def function(*args: object, **kwargs: object) -> int:
        return answer if _override.active else original(*args, **kwargs)

    return function


_override = ThreadOverride(_install)

# Inside, `jax.process_count()` is 1 and `jax.process_index()` is 0 for the calling thread.
as_single_process = _override.on_this_thread
