"""Authentication: API keys on all routes except health checks and the page, admin keys on the admin routes,
metrics keys on /metrics. It also determines the caller of a request (`caller_of`)."""

import base64
import binascii
from collections import Counter
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from streamserve.api.http.errors import error_response
from streamserve.protocol.errors import RequestError
from streamserve.protocol.keys import digest, matches, tenants

PUBLIC_PATHS = frozenset({"/health", "/ping", "/"})
"""Routes that need no key and reveal nothing sensitive: load balancers' health checks, and the page for
people, which asks for the key itself."""

ASSETS_PREFIX = "/assets/"
"""Path prefix of the page's files, which are public like the page."""

ADMIN_PREFIX = "/admin/"
"""Path prefix of the admin routes."""

ADMIN_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Further admin routes, at the paths where vLLM has them."""

METRICS_PATH = "/metrics"
"""The route that metrics keys open. API keys open it, too."""

BROWSER_PATHS = frozenset({"/docs", "/openapi.json"})
"""Routes that people open in a browser, which asks them for the key as the password of Basic authentication;
the user name is ignored.

Basic authentication is limited to these routes, since browsers add the credentials to every later request,
whichever site's page makes it.
"""

ANYONE = ""
"""The caller where no key is required: on a server without keys, and on public and admin routes."""

_CALLER = "caller"


class Authentication:
    """Middleware that passes a request to `app` if it has a valid key: `Authorization: Bearer KEY`, or
    `X-Api-Key: KEY` without an Authorization header.

    All keys are digests; in `keys`, a digest may be followed by the key's tenant (protocol/keys.py). Without
    `keys`, all routes are open except the admin routes, and except /metrics if there are `metrics_keys`.
    Without `admin_keys`, the admin routes are closed. `max_requests_per_key` limits the open requests and
    WebSockets of one key.
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
        self._tenants = tenants(keys)
        self._keys = self._tenants.keys()
        self._admin_keys = admin_keys
        self._metrics_keys = metrics_keys
        self._limit = max_requests_per_key
        self._open: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        key = _request_key(Headers(scope=scope), path)
        error = self._refusal(path, key)
        if error:
            response = error_response(error, scope)
            if error.status == 401:
                response.headers["WWW-Authenticate"] = "Basic" if path in BROWSER_PATHS else "Bearer"
            await response(scope, receive, send)
            return
        known = self._checked(path, key)
        with_caller(scope, self._tenants.get(known, known) if known else ANYONE)
        if not known or self._limit is None:
            await self._app(scope, receive, send)
        else:
            await self._counted(scope, receive, send, known, self._limit)

    async def _counted(self, scope: Scope, receive: Receive, send: Send, key: str, limit: int) -> None:
        """Pass a request on, unless its key has reached the limit of open requests. `key` is a digest."""
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

    def _checked(self, path: str, key: str) -> str:
        """Return the digest of a request's valid key; "" if its route requires none of the `keys`."""
        return digest(key) if self._keys and not _is_public(path) and not _is_admin(path) else ""

    def _refusal(self, path: str, key: str) -> RequestError | None:
        if _is_public(path):
            return None
        if _is_admin(path):
            return self._admin_refusal(key)
        allowed = [*self._keys, *self._metrics_keys] if path == METRICS_PATH else self._keys
        return _invalid_key(key) if allowed and not matches(key, allowed) else None

    def _admin_refusal(self, key: str) -> RequestError | None:
        if self._admin_keys:
            return None if matches(key, self._admin_keys) else _invalid_key(key)
        if self._keys and not matches(key, self._keys):
            return _invalid_key(key)
        return RequestError("admin routes are closed: start the server with an --admin-key-file", status=403)


def _is_admin(path: str) -> bool:
    return path.startswith(ADMIN_PREFIX) or path in ADMIN_PATHS


def with_caller(scope: Scope, caller: str) -> Scope:
    """Mark `scope` as a request of `caller`, and return it."""
    scope.setdefault("state", {})[_CALLER] = caller
    return scope


def caller_of(connection: HTTPConnection) -> str:
    """Return the id of the caller of a request or WebSocket: the owner of the objects that it stores.

    It is the tenant of the key, or `ANYONE` if no key is required. Stored objects of other callers do not
    exist for a caller (404).
    """
    caller: str = connection.scope["state"][_CALLER]
    return caller


def _is_public(path: str) -> bool:
    return path in PUBLIC_PATHS or path.startswith(ASSETS_PREFIX)


def _request_key(headers: Headers, path: str) -> str:
    """Return the key of a request; "" if there is none."""
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
