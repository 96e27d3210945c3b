"""GET /: a page, without build step or external assets, to see the server's state and try it."""

import base64
import hashlib
import re
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from streamserve.api.generation import AppContext
from streamserve.api.routes import Route

_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


def content_security_policy(page: bytes) -> str:
    """Return a policy that allows only the page's inline script and style, by their hashes, and connections
    to this server only."""
    allowed: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
        allowed[kind.decode()].append(f"'sha256-{digest}'")
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(allowed['script'])}",
            f"style-src {' '.join(allowed['style'])}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


_PAGE = resources.files("streamserve.api.ops").joinpath("page.html").read_bytes()
_HEADERS = {
    "Content-Security-Policy": content_security_policy(_PAGE),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


async def show(context: AppContext, request: Request) -> Response:
    """Return the page."""
    return Response(_PAGE, headers=_HEADERS, media_type="text/html; charset=utf-8")


PAGE_ROUTES: tuple[Route[AppContext], ...] = (Route("GET", "/", show),)
"""Not in the OpenAPI document, as the page is for people."""
