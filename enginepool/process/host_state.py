"""Restores the state of the host process that building an engine changes.

What breaks: The host's random numbers repeat, its environment and JAX's configuration change,
progress bars and warnings are printed, and a thread of tqdm stays.
Why: Upstream's constructors seed `random` and NumPy, set environment variables and JAX's options,
and show what they load; they assume that the process is theirs.
Remove when: Building an Engine leaves the process alone; a test compares it before and after.

Everything here is process-wide. So builds hold `BUILD_LOCK`: two at once would each restore what
the other had changed. No private part of upstream is used.
"""

from __future__ import annotations

import functools
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from tqdm.std import tqdm

from enginepool.process.quiet import no_generation_warnings
from enginepool.process.thread_override import ThreadOverride

BUILD_LOCK = threading.RLock()

# Set by upstream whenever a ServerArgs is made, and by the import of JAX and its TPU support.
_ENVIRONMENT = (
    "SGLANG_ENABLE_DETERMINISTIC_SAMPLING",
    "TF_CPP_MIN_LOG_LEVEL",
    "TPU_SKIP_MDS_QUERY",
)

# JAX's options of the persistent compilation cache that upstream's scheduler changes if our patch
# is not applied.
_JAX_CONFIG = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_enable_xla_caches",
)


@contextmanager
def preserved() -> Iterator[None]:
    """Restore on exit the process-wide state that upstream changes while it builds.

    Holds `BUILD_LOCK`. Of the environment, only `_ENVIRONMENT` is restored. The global `random`
    and NumPy generators return to their state at entry, because upstream seeds both. Other threads
    that use them meanwhile will get the same numbers again.
    """
    with BUILD_LOCK:
        environ = dict(os.environ)
        config = {name: getattr(jax.config, name) for name in _JAX_CONFIG}
        python_random, numpy_random = random.getstate(), np.random.get_state()
        try:
            with no_progress_bars(), no_generation_warnings():
                yield
        finally:
            random.setstate(python_random)
            np.random.set_state(numpy_random)
            for name, value in config.items():
                if getattr(jax.config, name) != value and not _protects(name):
                    jax.config.update(name, value)
            restore_environ(environ)


def _protects(name: str) -> bool:
    """Whether upstream has switched the persistent cache off. It does so only without our patch,
    because on TPU a cached program crashes on a device above 0."""
    return name == "jax_compilation_cache_dir" and not getattr(jax.config, name)


def restore_environ(before: dict[str, str]) -> None:
    """Restore the variables of `_ENVIRONMENT` as they were in `before`."""
    for name in _ENVIRONMENT:
        if os.environ.get(name) != before.get(name):
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def _hide_progress_bars() -> Callable[[], None]:
    original = tqdm.__init__, tqdm.monitor_interval
    # The first bar of a process starts tqdm's monitor thread, which never ends. 0 starts none.
    tqdm.__init__, tqdm.monitor_interval = _silenced(tqdm.__init__), 0

    def restore() -> None:
        tqdm.__init__, tqdm.monitor_interval = original

    return restore


def _silenced(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: tqdm, *args: Any, **kwargs: Any) -> None:
        if _hidden.active:
            kwargs["disable"] = True
        original(self, *args, **kwargs)

    return init


_hidden = ThreadOverride(_hide_progress_bars)

# Inside, the bars that upstream shows while it loads and compiles are not shown on this thread.
no_progress_bars = _hidden.on_this_thread
