"""What is process-wide and makes engines cheaper: while a pool opens, and with `tune_host=True`."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds after which a thread that wants the GIL gets it from one that computes. Python's own 5 ms
# are half a step: an engine whose step is done waits for them whenever the host's code runs.
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
    """While the block lasts threads hand over the GIL sooner, and garbage collections pass over
    what exists now.

    Process-wide. Blocks may overlap; the last puts back what the first found, unless someone has
    changed it meanwhile.
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
    """While the block lasts garbage collections pass over what exists now: a full one stops every
    thread, for as long as the host has objects.

    Process-wide. Blocks may overlap, each adds what is new; after the last, collections see it
    all again. Objects that the host itself has frozen stay frozen, and then only those are.
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
