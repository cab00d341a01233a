"""The HTTP requests that are being served, and whether more are taken."""

from __future__ import annotations

from collections.abc import Callable

from enginepool.dispatch.request import Request
from enginepool.errors import InvalidRequest
from enginepool.serve.admin_operations import AdminOperations
from enginepool.serve.error_replies import Refused
from enginepool.serve.options import ServeOptions
from enginepool.serve.record import ExchangeRecord
from enginepool.values import shown


class OpenExchanges:
    """Used on the server's event loop only. Its length is the number of requests.

    Attributes:
        draining: Whether new requests are refused while running ones finish.
        cut: The message for unfinished requests, once the drain's time is over. None before.
        aborts: How often all requests were aborted.
    """

    def __init__(
        self,
        options: ServeOptions,
        admin: AdminOperations,
        note: Callable[[ExchangeRecord], None],
    ) -> None:
        """
        Args:
            note: Called with the record of each request that has ended.
        """
        self.draining = False
        self.cut: str | None = None
        self.aborts = 0
        self._options, self._admin, self._note = options, admin, note
        self._count = 0
        self._rids: set[str] = set()
        self._aborted: set[str] = set()  # of these

    def __len__(self) -> int:
        return self._count

    def check_open(self) -> None:
        """Raise if new requests are not taken now."""
        if self.draining:
            raise Refused(
                503, "the server is shutting down and takes no new requests", code="draining",
                retry_after=10,
            )  # fmt: skip
        if self._options.reject_while_reloading and self._admin.reloading:
            raise Refused(503, "new weights are being loaded", code="reloading", retry_after=1)

    def check_cut(self) -> None:
        """Raise if the drain's time is over. A request may only now be ready to run."""
        if self.cut is not None:
            raise Refused(503, self.cut, code="draining", retry_after=10)

    def began(self) -> None:
        self._count += 1

    def claim(self, rids: frozenset[str]) -> frozenset[str]:
        """Keep a client's ids for an exchange until it ends; raise if one is taken."""
        for rid in rids & self._rids:
            raise InvalidRequest(
                f"rid={shown(rid)}: a request of that id has not ended; give another, or none"
            )
        self._rids |= rids
        return rids

    def abort(self, rid: str | None) -> None:
        """Note that the requests of an id, or all, are aborted: some may not be submitted yet."""
        if rid is None:
            self.aborts += 1
        elif rid in self._rids:
            self._aborted.add(rid)

    def was_aborted(self, request: Request, since: int) -> bool:
        """Whether a request of a client was aborted after the first `since` aborts of all."""
        return self.aborts > since or request.rid in self._aborted

    def ended(self, record: ExchangeRecord, rids: frozenset[str]) -> None:
        """
        Args:
            rids: What the exchange has claimed.
        """
        self._count -= 1
        self._rids -= rids
        self._aborted -= rids
        self._note(record)
