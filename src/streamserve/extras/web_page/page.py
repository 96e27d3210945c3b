"""GET /: the page for people, with a chat and the state of the fleet.

Its files need no build step and load nothing from elsewhere. They are identical for all clients, so they need
no key: the page's script asks for one if the server refuses its requests.
"""

import hashlib
import secrets
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from streamserve.api.context import AppContext
from streamserve.api.http.auth import ASSETS_PREFIX
from streamserve.api.routes import Route
from streamserve.protocol.errors import RequestError

_MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_COMMON_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


def _files() -> dict[str, bytes]:
    """Return the page's files by name."""
    folder = resources.files("streamserve.extras.web_page").joinpath("web")
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


FILES = _files()
VERSION = hashlib.sha256(b"".join(FILES[name] for name in sorted(FILES))).hexdigest()[:16]
"""Hash of the contents of all files. It is part of their address, so that browsers may cache them without
limit."""

_PARTS = {name: FILES[f"{name}.html"].decode() for name in ("icons", "nav")}
"""HTML that all pages have: the icons, and the head of the sidebar."""

ASSETS = f"{ASSETS_PREFIX.strip('/')}/{VERSION}"
"""Address of the files relative to the page, which may be served by a proxy that adds a prefix."""


def content_security_policy(nonce: str) -> str:
    """Return a policy that allows scripts with `nonce` and scripts that they import, and styles, images and
    connections of this server. Text never becomes markup (trusted types)."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src 'nonce-{nonce}'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )


def page_response(name: str, **values: str) -> Response:
    """Return an HTML file in which each `{name}` is replaced by its value: the parts of all pages, `values`,
    the assets' address, and a nonce."""
    nonce = secrets.token_urlsafe(16)
    text = FILES[name].decode()
    for key, value in {**_PARTS, "assets": ASSETS, "nonce": nonce, **values}.items():
        text = text.replace(f"{{{key}}}", value)
    headers = {
        **_COMMON_HEADERS,
        "Content-Security-Policy": content_security_policy(nonce),
        "Cache-Control": "no-store",
    }
    return Response(text, headers=headers, media_type="text/html; charset=utf-8")


async def show(context: AppContext, request: Request) -> Response:
    """Return the page."""
    return page_response("index.html")


async def asset(context: AppContext, request: Request) -> Response:
    """Return a file of the page. Raises RequestError (404) for another version or an unknown name."""
    version, name = request.path_params["version"], request.path_params["name"]
    media_type = _MEDIA_TYPES.get(name.rpartition(".")[2])
    if version != VERSION or name not in FILES or media_type is None:
        raise RequestError("there is no such file: reload the page", status=404)
    headers = {**_COMMON_HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}
    return Response(FILES[name], headers=headers, media_type=media_type)


PAGE_ROUTES: tuple[Route[AppContext], ...] = (
    Route("GET", "/", show),
    Route("GET", ASSETS_PREFIX + "{version}/{name}", asset),
)
"""Without operations: the page is for people, so it is not in the OpenAPI document."""
