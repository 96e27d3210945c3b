"""GET /: a page, without build step or external assets, to see the server's state and try it."""

import base64
import hashlib
import re
from importlib import resources

from fastapi import APIRouter, Response

_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


def page_routes() -> APIRouter:
    """Build the route. It is not in the API description, as it is for people."""
    router = APIRouter()
    page = resources.files("streamserve.api.ops").joinpath("page.html").read_bytes()
    headers = {
        "Content-Security-Policy": content_security_policy(page),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }

    @router.get("/", include_in_schema=False)
    async def show() -> Response:
        return Response(page, headers=headers, media_type="text/html; charset=utf-8")

    return router


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
