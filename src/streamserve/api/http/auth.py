"""Authentication: API keys on all routes but health checks and the page, admin keys on the admin routes,
metrics keys on /metrics."""

import base64
import binascii
from collections import Counter
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from streamserve.api.http.errors import error_response
from streamserve.protocol.errors import RequestError
from streamserve.protocol.keys import digest, matches

PUBLIC_PATHS = frozenset({"/health", "/ping", "/"})
"""Routes that need no key, and reveal nothing sensitive: load balancers' health checks, and the page for
people, which asks for the key itself."""

ASSETS_PREFIX = "/assets/"
"""Path prefix of the page's files, which are public like the page."""

ADMIN_PREFIX = "/admin/"
"""Path prefix of the admin routes."""

METRICS_PATH = "/metrics"
"""The route that metrics keys open, and only they and the API keys."""

BROWSER_PATHS = frozenset({"/docs", "/openapi.json"})
"""Routes that people open in a browser, which asks them for the key as the password of Basic authentication;
the user name is ignored.

Basic authentication is limited to these routes, since browsers add the credentials to every later request,
whichever site's page makes it.
"""

_OWNER = "owner"


class Authentication:
    """Middleware that passes a request to `app` if it has a valid key: `Authorization: Bearer KEY`, or
    `X-Api-Key: KEY` where there is no such header.

    All keys are digests (protocol/keys.py). Without `keys` all but the admin routes are open, though /metrics
    is not if there are `metrics_keys`; without `admin_keys` the admin routes are closed. At most
    `max_requests_per_key` requests and WebSockets of one key are open at once.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Collection[str],
        admin_keys: Collection[str],
        max_requests_per_key: int | None = None,
        metrics_keys: Collection[str] = (),
    ) -> None:
        self._app = app
        self._keys = keys
        self._admin_keys = admin_keys
        self._metrics_keys = metrics_keys
        self._limit = max_requests_per_key
        self._open: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            error = self._refusal(scope)
            if error:
                response = error_response(error, scope)
                if error.status == 401:
                    response.headers["WWW-Authenticate"] = (
                        "Basic" if scope["path"] in BROWSER_PATHS else "Bearer"
                    )
                await response(scope, receive, send)
                return
            path = scope["path"]
            if self._keys and not _is_public(path) and not path.startswith(ADMIN_PREFIX):
                key = digest(_request_key(Headers(scope=scope), path))
                with_owner(scope, key)
                if self._limit is not None:
                    await self._counted(scope, receive, send, key, self._limit)
                    return
        await self._app(scope, receive, send)

    async def _counted(self, scope: Scope, receive: Receive, send: Send, key: str, limit: int) -> None:
        """Pass a request on, unless its key, given as a digest, has reached its limit of open requests."""
        if self._open[key] >= limit:
            message = f"{limit} requests with this key are open, which is the limit (max_requests_per_key)"
            error = RequestError(message, status=429, retry_after=1.0)
            await error_response(error, scope)(scope, receive, send)
            return
        self._open[key] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]

    def _refusal(self, scope: Scope) -> RequestError | None:
        path = scope["path"]
        if _is_public(path):
            return None
        key = _request_key(Headers(scope=scope), path)
        if path.startswith(ADMIN_PREFIX):
            return self._admin_refusal(key)
        allowed = [*self._keys, *self._metrics_keys] if path == METRICS_PATH else self._keys
        return _invalid_key(key) if allowed and not matches(key, allowed) else None

    def _admin_refusal(self, key: str) -> RequestError | None:
        if self._admin_keys:
            return None if matches(key, self._admin_keys) else _invalid_key(key)
        if self._keys and not matches(key, self._keys):
            return _invalid_key(key)
        return RequestError("admin routes are closed: start the server with an --admin-key-file", status=403)


def with_owner(scope: Scope, owner: str) -> Scope:
    """Return `scope`, changed to be a request of `owner`."""
    scope.setdefault("state", {})[_OWNER] = owner
    return scope


def owner_of(connection: HTTPConnection) -> str:
    """Return the digest of the key of a request, to which belongs what it stores; empty on a server without
    keys."""
    owner: str = connection.scope["state"].get(_OWNER, "")
    return owner


def _is_public(path: str) -> bool:
    return path in PUBLIC_PATHS or path.startswith(ASSETS_PREFIX)


def _request_key(headers: Headers, path: str) -> str:
    """Return the key of a request; empty if there is none."""
    if "authorization" not in headers:
        return headers.get("x-api-key", "").strip()
    kind, _, value = headers["authorization"].partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() == "basic" and path in BROWSER_PATHS:
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return ""


def _invalid_key(key: str) -> RequestError:
    reason = "this key is not valid" if key else "a key is required"
    return RequestError(f"{reason}: send it as Authorization: Bearer KEY, or as X-Api-Key: KEY", status=401)
