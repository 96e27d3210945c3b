"""The path that a client probably meant, if a request's path is wrong: with or without /v1, with a trailing
slash, or misspelled."""

import re
from collections.abc import Iterator
from difflib import get_close_matches

from starlette.requests import Request
from starlette.routing import Match, Route

_SIMILAR = 0.8
"""Least similarity of a path and the path that was probably meant, as difflib measures it."""


def near_path(request: Request) -> str | None:
    """Return a served path that resembles the request's path and takes its method; None if there is none."""
    path = request.scope["path"]
    for near in _near(path):
        scope = {**request.scope, "path": near}
        if near != path and any(route.matches(scope)[0] is Match.FULL for route in _supported(request)):
            return near
    return None


def similar_path(request: Request) -> str | None:
    """Return the route's path that is most similar to the path of `request`, and takes its method; None if
    none is similar."""
    paths = [route.path for route in _supported(request) if request.method in (route.methods or ())]
    return next(iter(get_close_matches(request.scope["path"].lower(), paths, 1, _SIMILAR)), None)


def _supported(request: Request) -> Iterator[Route]:
    """Yield the application's routes, except those that only refuse requests."""
    return (route for route in request.app.routes if isinstance(route, Route) and route.include_in_schema)


def _near(path: str) -> Iterator[str]:
    path = re.sub(r"/+", "/", path).rstrip("/")
    yield path
    yield f"/v1{path}"
    yield path[max(path.rfind("/v1/"), 0) :]
    yield path.removeprefix("/v1")
