"""Handing a call over to the engines, for as long as its caller stays."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Protocol

from enginepool.dispatch.request import Call, Request
from enginepool.process.forks import Home


class Dispatcher(Protocol):
    """Where calls go to."""

    home: Home

    def submit(self, call: Call) -> None:
        """Queue a call's requests, or raise what keeps them from it."""

    def abort(self, requests: Iterable[Request], message: str, err_type: str) -> None:
        """End exactly these requests; returns at once."""

    def refuse_to_wait(self, call: Call) -> None:
        """Raise InvalidRequest where the caller would wait for itself."""


@contextlib.contextmanager
def submitted(dispatch: Dispatcher, call: Call) -> Iterator[None]:
    """Queue a call's requests for as long as the block lasts: a caller that leaves it early
    (cancelled, interrupted, iterator closed) ends them inside the engines.

    Raises:
        EnginePoolError: What `Dispatcher.submit` raises.
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


def _leave(dispatch: Dispatcher, call: Call) -> None:
    if dispatch.home.here:
        dispatch.abort(call.requests, "the caller left", "cancelled")
