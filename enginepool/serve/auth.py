"""Checks who may do what. Requests may need an API key. Administrators need the admin token,
except from trusted networks. Without such a token only this machine and trusted networks may
administer."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from enginepool.serve.error_replies import Refused
from enginepool.serve.options import ServeOptions, is_loopback
from enginepool.serve.pages import PAGES

# Paths that need no key: probes and metrics, as in upstream, and the pages, which hold no data.
# `/health_generate` needs one, because it makes engines work.
OPEN = frozenset({*PAGES, "/health", "/ready", "/metrics"})

# Headers that a browser sends for a page of another site, or that a proxy adds.
_FOREIGN = (
    "origin",
    "forwarded",
    "via",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
    "x-real-ip",
)


class Guard:
    """Middleware before all routes: a request that is not allowed is not read."""

    def __init__(
        self,
        app: ASGIApp,
        options: ServeOptions,
        admin_paths: frozenset[str],
        refuse: Callable[[str, Refused], ASGIApp],
    ) -> None:
        self.app = app
        self._refuse = refuse
        self._options = options
        self._admin_paths = admin_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = None
        admin = scope.get("path") in self._admin_paths
        if admin and not self._options.enable_admin:
            refused = Refused(404, "administration is off; start the server with --enable-admin")
        elif scope["type"] == "http" and scope["path"] not in OPEN:
            address = (scope.get("client") or ("",))[0]
            refused = self._refusal(Headers(scope=scope), address if admin else None)
        if refused is None:
            await self.app(scope, receive, send)
        else:
            await self._refuse(scope["path"], refused)(scope, receive, send)

    def _refusal(self, headers: Headers, admin: str | None) -> Refused | None:
        """
        Args:
            admin: The client's address if the route is an administrator's. Else None.
        """
        options = self._options
        secret, name = options.api_key, "API key"
        if admin is not None:
            reason = _forwarded_because(headers) or _untrusted_because(headers, options, admin)
            if options.admin_token is not None:
                # Clients of trusted networks need no token. All others do.
                if reason is not None or not options.trusts(admin):
                    secret, name = options.admin_token, "admin token"
            elif reason is not None:
                return Refused(403, f"{reason}; start the server with --admin-token to allow this")
        if secret is None:
            return None
        given = _bearer(headers)
        if given is None:
            return Refused(
                401, f"no {name}: send 'Authorization: Bearer …'", code="invalid_api_key"
            )
        if not secrets.compare_digest(given.encode("latin-1"), secret.encode()):
            return Refused(401, f"wrong {name}", code="invalid_api_key")
        return None


def _untrusted_because(headers: Headers, options: ServeOptions, address: str) -> str | None:
    """The reason why a request may come from an untrusted machine; None if there is none."""
    if options.trusts(address):
        # DNS rebinding: a browser there may show a page of another site, and that site's host name
        # may resolve to this machine.
        browser = "accept-language" in headers
        return "requests of a browser may not administer this server" if browser else None
    if not is_loopback(address):
        return f"requests from {address} may not administer this server"
    # DNS rebinding: another site's host name may resolve to this machine.
    host = headers.get("host", "")
    name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
    if not is_loopback(name.strip("[]")):
        return f"requests to the host {host!r} may not administer this server"
    return None


def _forwarded_because(headers: Headers) -> str | None:
    """The sign that a browser or a proxy passed a request on; None if there is none."""
    for name in _FOREIGN:
        if name in headers:
            return f"requests with the header {name!r} may not administer this server"
    if _of_another_site(headers):
        return "requests from another site may not administer this server"
    return None


def sent_by_a_page(headers: Headers) -> bool:
    """Whether a page in a browser has sent this. It may be a page of another site."""
    return "origin" in headers or _of_another_site(headers)


def _of_another_site(headers: Headers) -> bool:
    return headers.get("sec-fetch-site", "none") not in ("none", "same-origin")


def _bearer(headers: Headers) -> str | None:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" and given.strip() else None
