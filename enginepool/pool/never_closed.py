"""Closes pools that the user did not close: when the script ends, or when a pool is dropped."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable

from enginepool.engine.worker import on_engine_thread
from enginepool.process.forks import record_python_ends
from enginepool.runtime.runtime import Runtime

# How long `close()` waits for the engines' threads. A thread inside a step cannot be ended.
CLOSE_SECONDS = 60.0


def closing_at_exit(runtime: Runtime) -> Callable[[], None]:
    """The exit hook of a pool that was not closed. It holds no reference to the pool."""

    def close() -> None:
        if runtime.dispatch.process.here:  # not in a forked child that runs exit hooks
            record_python_ends()
            runtime.close(CLOSE_SECONDS)
            warnings.warn(f"pool {runtime.name!r} was never closed", ResourceWarning, stacklevel=2)

    return close


def close_dropped(pool: object, close: Callable[[], None]) -> None:
    """Warn about a pool that is dropped, and close it. Called by its `__del__`."""
    try:
        warnings.warn(f"{pool!r} was dropped without close()", ResourceWarning, 3, source=pool)
    finally:  # if warnings are errors, `warn` raises
        if on_engine_thread():
            # The garbage collector runs this on an engine's thread, of this pool or of another
            # one. `close` waits for such threads, so it needs a thread of its own.
            with contextlib.suppress(RuntimeError):  # no new threads while Python ends
                threading.Thread(target=close, daemon=True).start()
        else:
            close()
