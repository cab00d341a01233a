"""Process-wide settings that make engines faster: while a pool opens, and with `tune_host=True`."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds after which a thread that waits for the GIL gets it from one that computes. Python's own
# 5 ms are half a step: an engine whose step is done waits that long whenever the host's code runs.
_SWITCH_SECONDS = 0.0005

# Python 3.12 keeps some hundred objects frozen by itself; a host's `gc.freeze` has many more.
_FROZEN_BY_PYTHON = 1000

_lock = threading.Lock()
_tuned = 0
_found_interval = 0.0
_freezes = 0
_may_unfreeze = False


@contextmanager
def tuned() -> Iterator[None]:
    """Inside the block, threads hand over the GIL sooner, and garbage collections skip the objects
    that exist now.

    Process-wide. Blocks may overlap: the last one restores what the first one found, unless other
    code has changed it since.
    """
    global _tuned, _found_interval
    with _lock:
        _tuned += 1
        if _tuned == 1:
            _found_interval = sys.getswitchinterval()
            sys.setswitchinterval(min(_found_interval, _SWITCH_SECONDS))
    try:
        gc.collect()
        with frozen():
            yield
    finally:
        with _lock:
            _tuned -= 1
            if _tuned == 0 and sys.getswitchinterval() == min(_found_interval, _SWITCH_SECONDS):
                sys.setswitchinterval(_found_interval)


@contextmanager
def frozen() -> Iterator[None]:
    """Inside the block, garbage collections skip the objects that exist now. A full collection
    stops every thread, for longer the more objects there are.

    Process-wide. Blocks may overlap: each one adds the objects that are new. After the last one,
    collections look at all objects again. If the host itself has frozen objects, this does nothing.
    """
    global _freezes, _may_unfreeze
    with _lock:
        _freezes += 1
        if _freezes == 1:
            _may_unfreeze = gc.get_freeze_count() < _FROZEN_BY_PYTHON
        if _may_unfreeze:
            gc.freeze()
    try:
        yield
    finally:
        with _lock:
            _freezes -= 1
            if _freezes == 0 and _may_unfreeze:
                gc.unfreeze()
