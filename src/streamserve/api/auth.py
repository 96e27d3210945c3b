"""Who may come in: API keys on every route but two, admin keys on the admin routes."""

import base64
import binascii
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from streamserve.api.errors import error_response
from streamserve.protocol.errors import RequestError
from streamserve.protocol.keys import matches

OPEN = frozenset({"/health", "/ping"})
"""Routes that balancers ask: they need no key, and tell nothing of use."""

ADMIN = "/admin/"
"""What the paths of admin routes begin with."""

PAGES = frozenset({"/", "/docs", "/openapi.json"})
"""What people open in a browser, which asks them for the key, as the password of a name that does not matter.
Only here, since browsers add what they were told to every later request, whoever's page made it."""


class Authentication:
    """Lets a request through to `app` if it shows a key: `Authorization: Bearer KEY`.

    `keys` and `admin_keys` are digests (protocol/keys.py). Without `keys` all but the admin routes are open;
    without `admin_keys` the admin routes are closed.
    """

    def __init__(self, app: ASGIApp, keys: Collection[str], admin_keys: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._admin_keys = admin_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            refused = self._refusal(scope)
            if refused:
                response = error_response(refused)
                if refused.status == 401:
                    response.headers["WWW-Authenticate"] = "Basic" if scope["path"] in PAGES else "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> RequestError | None:
        path = scope["path"]
        if path in OPEN:
            return None
        shown = _shown(Headers(scope=scope), path)
        if path.startswith(ADMIN):
            return self._admin_refusal(shown)
        return _unknown(shown) if self._keys and not matches(shown, self._keys) else None

    def _admin_refusal(self, shown: str) -> RequestError | None:
        if self._admin_keys:
            return None if matches(shown, self._admin_keys) else _unknown(shown)
        if self._keys and not matches(shown, self._keys):
            return _unknown(shown)
        return RequestError("admin routes are closed: start the server with an --admin-key-file", status=403)


def _shown(headers: Headers, path: str) -> str:
    """The key that a request shows; empty if none."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() == "basic" and path in PAGES:
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return ""


def _unknown(shown: str) -> RequestError:
    what = "this key is not known here" if shown else "a key is needed"
    return RequestError(f"{what}: send it as Authorization: Bearer KEY", status=401)
