"""Handing a call over to the engines, for as long as its caller stays."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from enginepool.dispatch.dispatch import Dispatch
from enginepool.dispatch.request import Call


@contextlib.contextmanager
def submitted(dispatch: Dispatch, call: Call) -> Iterator[None]:
    """Queue a call's requests for as long as the block lasts: a caller that leaves it early
    (cancelled, interrupted, iterator closed) ends them inside the engines.

    Raises:
        EnginePoolError: What `Dispatch.submit` raises.
    """
    try:
        dispatch.submit(call)
        yield
    except GeneratorExit:
        # Perhaps the garbage collector closes the iterator, on a thread that holds a lock which
        # `abort` needs.
        with contextlib.suppress(RuntimeError):  # no new threads while Python ends
            threading.Thread(target=_leave, args=(dispatch, call), daemon=True).start()
        raise
    except BaseException:
        _leave(dispatch, call)
        raise


def _leave(dispatch: Dispatch, call: Call) -> None:
    if dispatch.process.here:
        dispatch.abort(call.requests, "the caller left", "cancelled")
