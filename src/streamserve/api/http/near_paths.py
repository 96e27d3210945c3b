"""The path that a client probably meant, if a request's path is wrong: with or without /v1, or a trailing
slash."""

import re
from collections.abc import Iterator

from starlette.requests import Request
from starlette.routing import Match


def near_path(request: Request) -> str | None:
    """Return a path near that of `request` that takes its method; None if there is none."""
    path = request.scope["path"]
    for near in _near(path):
        scope = {**request.scope, "path": near}
        if near != path and any(route.matches(scope)[0] is Match.FULL for route in request.app.routes):
            return near
    return None


def _near(path: str) -> Iterator[str]:
    path = re.sub(r"/+", "/", path).rstrip("/")
    yield path
    yield f"/v1{path}"
    yield path[max(path.rfind("/v1/"), 0) :]
    yield path.removeprefix("/v1")
