"""What makes N engines in one process cheaper, and is the host's to allow: `tune_host=True`."""

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
_froze = False


@contextmanager
def tuned() -> Iterator[None]:
    """While the block lasts threads hand over the GIL sooner, and garbage collections pass over
    what exists now; a full one stops every engine, for as long as the host has objects.

    Process-wide. Blocks may overlap; the last puts back what the first found, unless someone has
    changed it meanwhile. Objects that the host itself has frozen stay frozen.
    """
    global _tuned, _found_interval, _froze
    with _lock:
        _tuned += 1
        if _tuned == 1:
            _found_interval = sys.getswitchinterval()
            sys.setswitchinterval(min(_found_interval, _SWITCH_SECONDS))
            _froze = gc.get_freeze_count() < _FROZEN_BY_PYTHON
            if _froze:
                gc.collect()
                gc.freeze()
    try:
        yield
    finally:
        with _lock:
            _tuned -= 1
            if _tuned == 0:
                if sys.getswitchinterval() == min(_found_interval, _SWITCH_SECONDS):
                    sys.setswitchinterval(_found_interval)
                if _froze:
                    gc.unfreeze()
