"""Models that are loaded on demand: the model that a request names stays loaded while it is needed."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import UNSET
from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from streamserve.api.generation import AppContext
from streamserve.api.generator import Generator, Health
from streamserve.api.http.disconnect import while_connected
from streamserve.api.http.drain import Drain
from streamserve.api.http.ignored_fields import ignored_of
from streamserve.api.ops.models import ModelCard, card_of, served_name, unloaded_card_of
from streamserve.api.ops.pool_metrics import ModelState, PoolMetrics, exposition_of_all
from streamserve.protocol.errors import RequestError

_HELD = "held_models"


class Pool(Protocol):
    """Models by name, within a budget of bytes."""

    @property
    def models(self) -> Mapping[str, ModelState]: ...

    @property
    def budget(self) -> int: ...

    @property
    def used(self) -> int: ...

    async def acquire(self, name: str, patient: bool = False) -> None:
        """Wait until a model is loaded, and keep it loaded until `release`.

        Raises RequestError if it cannot be loaded, or not in time, unless `patient`.
        """

    def release(self, name: str) -> None:
        """End what `acquire` began."""


class Lease(NamedTuple):
    """The context of a model that is loaded until `release`."""

    context: AppContext
    release: Callable[[], None]


@dataclass(frozen=True)
class Serving:
    """The health of a server that serves requests."""

    ready: bool = True
    detail: str = "ready"
    retry_after: float | None = None
    missing: str = ""


@dataclass(frozen=True)
class Models:
    """The models of a server, by their names in the pool: the first one is the default."""

    contexts: Mapping[str, AppContext]
    pool: Pool
    max_model_len: Mapping[str, int]
    _reserved: set[str] = field(default_factory=set)

    def find(self, requested: str | None) -> str:
        """Return the pool's name of the requested model, or of the model of the requested LoRA adapter.

        Raises RequestError (404) for unknown names.
        """
        for name, context in self.contexts.items():
            if requested is None or requested in _names_of(context.llm):
                return name
        names = ", ".join(self._names())
        raise RequestError(
            f"The model '{requested}' does not exist; this server has: {names}", field="model", status=404
        )

    def owner_of(self, adapter: str) -> str | None:
        """Return the pool's name of the model of a LoRA adapter; None if there is no such adapter."""
        owners = (name for name, context in self.contexts.items() if adapter in context.llm.adapters)
        return next(owners, None)

    @contextmanager
    def reserved(self, adapter: str) -> Iterator[None]:
        """Keep a name for an adapter that is loaded meanwhile. Raises RequestError if it is in use."""
        if adapter in self._reserved or adapter in self._names():
            raise RequestError(f"lora_name: the name {adapter!r} is in use", field="lora_name")
        self._reserved.add(adapter)
        try:
            yield
        finally:
            self._reserved.remove(adapter)

    def _names(self) -> list[str]:
        return [name for context in self.contexts.values() for name in _names_of(context.llm)]

    def health(self) -> Health:
        """Return whether requests are served: not until the default model was loaded once, or while a loaded
        one is not served."""
        first = next(iter(self.contexts))
        if not self.pool.models[first].loads:
            return self.contexts[first].llm.health()
        healths = [context.llm.health() for name, context in self.contexts.items() if self.loaded(name)]
        missing = "; ".join(health.missing for health in healths if health.missing)
        return next((health for health in healths if not health.ready), Serving(missing=missing))

    def states(self) -> dict[str, str]:
        """Return the state of each model."""
        return {name: model.state for name, model in self.pool.models.items()}

    def cards(self) -> list[ModelCard]:
        """Return all names of all models and of their LoRA adapters, and what is known of each model now."""
        return [
            self._card(name, served, context.llm)
            for name, context in self.contexts.items()
            for served in _names_of(context.llm)
        ]

    def _card(self, name: str, served: str, llm: Generator) -> ModelCard:
        state = self.pool.models[name]
        length = self.max_model_len[name]
        try:
            card = card_of(llm, served)
        except RequestError:  # not loaded
            card = unloaded_card_of(llm, served, length)
        memory = UNSET if served in llm.adapters else state.size
        return msgspec.structs.replace(card, state=state.state, memory=memory)

    def exposition(self) -> bytes:
        """Return the metrics of all models in Prometheus' text format."""
        metrics = [context.metrics.collector for context in self.contexts.values()]
        return exposition_of_all([*metrics, PoolMetrics(self.pool.models, self.pool.budget)])

    async def lease(self, requested: str | None, patient: bool = False) -> Lease:
        """Return the context of a model, loaded.

        Raises RequestError: 404 for unknown names, 503 if it cannot be loaded, or not in time, unless
        `patient`, or if the server drains.
        """
        name = self.find(requested)
        context = self.contexts[name]
        if not self.loaded(name):
            await self._load(name, context.drain, patient)
        else:
            await self.pool.acquire(name)
        return Lease(context, partial(self.pool.release, name))

    def loaded(self, name: str) -> bool:
        """Return whether a model of the pool is loaded now."""
        return self.pool.models[name].state == "loaded"

    async def _load(self, name: str, drain: Drain, patient: bool) -> None:
        """Acquire a model. Raises RequestError (503) as soon as the server drains."""
        loading = asyncio.ensure_future(self.pool.acquire(name, patient))
        drained = asyncio.ensure_future(drain.begun())
        acquired = False
        try:
            await asyncio.wait({loading, drained}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                acquired = True
                return
        finally:
            loading.cancel()
            drained.cancel()
            await asyncio.gather(loading, drained, return_exceptions=True)
            if not (acquired or loading.cancelled() or loading.exception()):
                self.pool.release(name)  # it was loaded in the moment in which this ended
        raise RequestError(
            "the server is draining: it takes no new requests", status=503, retry_after=drain.seconds_left
        )


def _names_of(llm: Generator) -> tuple[str, ...]:
    """Return the names of a model and of its LoRA adapters."""
    return (*llm.served_names, *llm.adapters)


async def lease_of(context: AppContext, requested: str | None) -> Lease:
    """Return the context of the model that a request names, kept loaded until it is released.

    Raises RequestError as `Models.lease` does.
    """
    if context.models is not None:
        return await context.models.lease(requested)
    served_name(context.llm, requested)
    return Lease(context, _nothing)


async def routed(context: AppContext, request: Request, requested: str | None) -> AppContext:
    """Return the context of the model that `request` names, which stays loaded until the reply is sent.

    Raises RequestError as `Models.lease` does, ClientDisconnect if the client does not wait for it.
    """
    models = context.models
    if models is None:
        served_name(context.llm, requested)
        return context
    held = held_by(request)

    async def hold() -> AppContext:
        lease = await models.lease(requested)
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
    """Return the context of the model that the query parameter `model` names; by default the first one.

    Raises RequestError: 404 for unknown names, 409 if it must be `loaded` and is not.
    """
    requested, models = request.query_params.get("model"), context.models
    if models is None:
        served_name(context.llm, requested)
        return context
    name = models.find(requested)
    if loaded and not models.loaded(name):
        raise RequestError(f"the model {name!r} is not loaded", status=409)
    return models.contexts[name]


class HeldModels:
    """Middleware that releases the models which a request has leased, once it has ended (`held_by`)."""

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
    """Return what is released when a request has ended."""
    held: ExitStack = connection.scope["state"][_HELD]
    return held


def _nothing() -> None:
    """Release nothing."""
