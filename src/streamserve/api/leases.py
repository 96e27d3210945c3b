"""Leases of models: the model that a request names stays loaded until the reply is sent."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from streamserve.api.context import AppContext
from streamserve.api.http.disconnect import while_connected
from streamserve.api.http.ignored_fields import ignored_of
from streamserve.protocol.errors import RequestError

_HELD = "held_models"


class ModelLease(NamedTuple):
    """A loaded model in use by a request: its AppContext, and `release`, which ends the use. The model is not
    unloaded before `release` is called."""

    context: AppContext
    release: Callable[[], None]


async def lease_of(context: AppContext, requested: str | None, patient: bool = False) -> ModelLease:
    """Return the context of the model that a request names. The model stays loaded until the lease is
    released.

    Raises RequestError: 404 for an unknown name; 503 if the model cannot be loaded, or not in time (unless
    `patient`), or if the server drains.
    """
    models = context.models
    name = models.find(requested)
    await models.acquire(name, context.drain, patient)
    return ModelLease(context.of(name), partial(models.pool.release, name))


async def routed(context: AppContext, request: Request, requested: str | None) -> AppContext:
    """Return the context of the model that `request` names. The model stays loaded until the reply is sent.

    Raises RequestError as `lease_of` does, ClientDisconnect if the client disconnects before the model is
    loaded.
    """
    models, held = context.models, held_by(request)

    async def hold() -> AppContext:
        lease = await lease_of(context, requested)
        held.callback(lease.release)
        return lease.context

    loaded = models.loaded(models.find(requested))
    found = await (hold() if loaded else while_connected(request.receive, hold()))
    ignored_of(request).counted_by = found.metrics.ignored_fields
    return found


MODEL_PARAMETER: dict[str, Any] = {
    "name": "model",
    "in": "query",
    "description": "a name of the model, if the server has several models; by default the first model",
    "schema": {"type": "string"},
}


def named_context(context: AppContext, request: Request, loaded: bool = False) -> AppContext:
    """Return the context of the model that the query parameter `model` names, by default the first model.

    Raises RequestError: 404 for unknown names, 409 if the model must be `loaded` and is not.
    """
    name = context.models.find(request.query_params.get("model"))
    if loaded and not context.models.loaded(name):
        raise RequestError(f"the model {name!r} is not loaded", status=409)
    return context.of(name)


class HeldModels:
    """Middleware that releases the models leased by a request once the request has ended (`held_by`)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        with ExitStack() as held:
            scope.setdefault("state", {})[_HELD] = held
            await self._app(scope, receive, send)


def held_by(connection: HTTPConnection) -> ExitStack:
    """Return the stack that is unwound when a request has ended."""
    held: ExitStack = connection.scope["state"][_HELD]
    return held
