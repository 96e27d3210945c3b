"""CORS: which web pages may call this server. By default only the server's own pages may call it."""

import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from streamserve.api.http.errors import error_response
from streamserve.protocol.errors import RequestError

_LOOPBACK = frozenset({"localhost"})


class CORS:
    """Middleware that refuses requests from pages of other sites, unless their origin is allowed.

    Without CORS headers, such a page cannot read a reply, but it could still cause load; and WebSockets are
    not subject to CORS at all. With `local_only`, the Host must be localhost or an IP address: otherwise a
    page whose domain resolves to this server (DNS rebinding) would count as same-origin. Only browsers send
    an Origin, so other clients are not affected.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str], local_only: bool) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._local_only = local_only
        if origins:
            self._app = CORSMiddleware(
                app,
                allow_origins=list(origins),
                allow_methods=["GET", "POST", "PATCH", "DELETE"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Request-Id", "Retry-After", "Warning"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_request = scope["type"] in ("http", "websocket")
        error = self._refusal(Headers(scope=scope)) if is_request else None
        if error:
            await error_response(error, scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> RequestError | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._local_only and not _is_local(host):
            return RequestError(
                "without an API key this server accepts only localhost or an IP address as Host",
                status=403,
            )
        if origin is None or "*" in self._origins or origin in self._origins:
            return None
        if origin.partition("://")[2] == host:
            return None
        return RequestError("pages of this origin may not call this server (--cors-origin)", status=403)


def _is_local(host: str) -> bool:
    """Return whether a Host header is localhost or an IP address."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if name in _LOOPBACK:
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
