"""The application: all routes over a table of models, inside their middleware."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, WebSocketRoute

from streamserve.api.context import AppContext
from streamserve.api.generator import Generator
from streamserve.api.http.auth import Authentication
from streamserve.api.http.cors import CORS
from streamserve.api.http.descriptors import client_descriptors
from streamserve.api.http.errors import ERROR_HANDLERS
from streamserve.api.http.ignored_fields import FieldWarnings
from streamserve.api.http.limits import RequestMemory
from streamserve.api.http.memory import MemoryAccount
from streamserve.api.http.request_ids import RequestIds
from streamserve.api.leases import HeldModels
from streamserve.api.metrics.metrics import Metrics
from streamserve.api.metrics.pool_metrics import PoolMetrics
from streamserve.api.model_table import ModelEntry, ModelTable, Pool
from streamserve.api.openai.chat import CHAT_ROUTES
from streamserve.api.openai.completions import COMPLETION_ROUTES
from streamserve.api.openai.tokenize import TOKENIZE_ROUTES
from streamserve.api.ops.adapters import ADAPTER_ROUTES
from streamserve.api.ops.admin import ADMIN_ROUTES
from streamserve.api.ops.health import HEALTH_ROUTES
from streamserve.api.ops.loop_lag import measure_lag
from streamserve.api.ops.models import MODEL_ROUTES
from streamserve.api.ops.openapi import OPENAPI_ROUTES, Document, openapi_document
from streamserve.api.ops.routing import ROUTING_ROUTES
from streamserve.api.prompt_streams.context import stream_context
from streamserve.api.prompt_streams.routes import STREAM_ROUTES
from streamserve.api.prompt_streams.socket import socket
from streamserve.api.routes import BoundRoute, Route, bound
from streamserve.api.settings import ApiSettings
from streamserve.api.unsupported_routes import unsupported_endpoints
from streamserve.extras.anthropic.errors import ANTHROPIC_FORMAT
from streamserve.extras.anthropic.messages import MESSAGE_ROUTES
from streamserve.extras.batches.routes import BATCH_ROUTES, BatchContext, batch_context
from streamserve.extras.ollama.errors import OLLAMA_FORMAT
from streamserve.extras.ollama.routes import OLLAMA_ROUTES
from streamserve.extras.pooling.embeddings import EMBEDDING_ROUTES
from streamserve.extras.pooling.rerank import RERANK_ROUTES
from streamserve.extras.responses.context import response_context
from streamserve.extras.responses.responses import RESPONSE_ROUTES
from streamserve.extras.responses.stored_responses import STORED_RESPONSE_ROUTES
from streamserve.extras.web_page.docs import DOCS_ROUTES
from streamserve.extras.web_page.page import PAGE_ROUTES
from streamserve.protocol.sampling import SamplingParams

OPTIONAL_ROUTES: tuple[Route[AppContext], ...] = (
    *MESSAGE_ROUTES,
    *OLLAMA_ROUTES,
    *EMBEDDING_ROUTES,
    *RERANK_ROUTES,
    *PAGE_ROUTES,
)
"""Routes of the optional parts. Leaving out any of these parts does not affect the other routes."""

ERROR_FORMATS = (ANTHROPIC_FORMAT, OLLAMA_FORMAT)
"""Error formats of the optional APIs. Errors on all other paths have OpenAI's format."""


@dataclass(frozen=True)
class OnDemand:
    """A model that is loaded on demand: its API settings, and its context length in tokens."""

    llm: Generator
    settings: ApiSettings
    max_model_len: int


class BudgetedPool(Pool, Protocol):
    """A pool that loads models within a budget of bytes."""

    @property
    def budget(self) -> int: ...


def create_app(llm: Generator, settings: ApiSettings | None = None) -> Starlette:
    """Build the application with OpenAI's and Anthropic's APIs over `llm`.

    `llm` may still be loading: until it is ready, /health reports that and requests get 503. Raises TypeError
    if `settings.default_sampling` names an unknown field, FolderError if the batch folder cannot be used.
    """
    return _application(app_context(llm, settings or ApiSettings()))


def create_app_on_demand(models: Mapping[str, OnDemand], pool: BudgetedPool) -> Starlette:
    """Build the application over the models of a pool, by their names in the pool. The first model is the
    default.

    The server's settings are the default model's. Raises TypeError and FolderError as `create_app` does.
    """
    entries = {name: _entry(model.llm, model.settings, model.max_model_len) for name, model in models.items()}
    return _application(_context(ModelTable(entries, pool, (PoolMetrics(pool.models, pool.budget),))))


def _application(context: AppContext) -> Starlette:
    """Build the application of a context."""
    generation = generation_endpoints(context)
    batches = batch_context(context, generation)
    app = Starlette(
        routes=_router_entries(context, generation, batches),
        middleware=_middleware(context),
        exception_handlers=ERROR_HANDLERS,
        lifespan=partial(_lifespan, context, batches),
    )
    app.router.redirect_slashes = False
    app.state.drain = context.drain
    app.state.memory = context.memory
    app.state.descriptors = context.descriptors
    return app


def app_context(llm: Generator, settings: ApiSettings) -> AppContext:
    """Return the context of all routes over one model. Raises TypeError as `create_app` does."""
    return _context(ModelTable({llm.served_names[0]: _entry(llm, settings)}))


def _entry(llm: Generator, settings: ApiSettings, planned_len: int | None = None) -> ModelEntry:
    """Return a model's entry in the table. Raises TypeError as `create_app` does."""
    SamplingParams(**settings.default_sampling)
    metrics = Metrics(llm.served_names[0], llm.report, llm.incidents, llm.routing)
    return ModelEntry(llm, settings, metrics, planned_len)


def _context(models: ModelTable) -> AppContext:
    """Return the context of all routes. The server's settings are the default model's."""
    default = next(iter(models.entries.values()))
    settings = default.settings
    context = AppContext(
        models,
        default,
        MemoryAccount(settings.max_memory_bytes),
        client_descriptors(settings.worker_bound),
    )
    default.metrics.memory.set_function(lambda: context.memory.held)
    return context


def generation_endpoints(context: AppContext) -> list[BoundRoute]:
    """Return the endpoints of OpenAI's API that generate text. Batches call them, too."""
    return [
        *bound((*COMPLETION_ROUTES, *CHAT_ROUTES), context),
        *bound((*RESPONSE_ROUTES, *STORED_RESPONSE_ROUTES), response_context(context)),
    ]


@asynccontextmanager
async def _lifespan(context: AppContext, batches: BatchContext, app: Starlette) -> AsyncIterator[None]:
    """Answer batches, and measure the event loop's lag, while the application runs."""
    observe = partial(context.metrics.observe, "event_loop_lag_seconds")
    measuring = asyncio.create_task(measure_lag(observe))
    if batches.folder is not None:
        batches.service.start()
    try:
        yield
    finally:
        measuring.cancel()
        if batches.folder is not None:
            await batches.service.close()


def _router_entries(
    context: AppContext, generation: list[BoundRoute], batches: BatchContext
) -> list[BaseRoute]:
    """Return all routes. The first one that matches a request serves it."""
    streams = stream_context(context)
    endpoints: list[BoundRoute] = [
        *generation,
        *bound(OPTIONAL_ROUTES, context),
        *bound(ADAPTER_ROUTES, context),
        *bound(STREAM_ROUTES, streams),
        *bound(BATCH_ROUTES, batches),
        *bound((*TOKENIZE_ROUTES, *MODEL_ROUTES, *ROUTING_ROUTES), context),
        *bound((*HEALTH_ROUTES, *ADMIN_ROUTES), context),
    ]
    document: Document = cache(
        lambda: openapi_document((endpoint.route for endpoint in endpoints), context.settings.strict_fields)
    )
    endpoints += bound((*DOCS_ROUTES, *OPENAPI_ROUTES), document)
    endpoints += unsupported_endpoints()
    entries = [endpoint.router_entry() for endpoint in endpoints]
    return [WebSocketRoute("/v1/streams/ws", partial(socket, streams)), *entries]


def _middleware(context: AppContext) -> list[Middleware]:
    """Return the middleware, in the order in which a request passes it."""
    settings = context.settings
    return [
        Middleware(RequestIds, formats=ERROR_FORMATS),
        Middleware(CORS, origins=settings.cors_origin, local_only=settings.local_only),
        Middleware(
            Authentication,
            keys=settings.api_key,
            admin_keys=settings.admin_key,
            metrics_keys=settings.metrics_key,
            max_requests_per_key=settings.max_requests_per_key,
        ),
        Middleware(RequestMemory, account=context.memory),
        Middleware(FieldWarnings, strict=settings.strict_fields, count=context.metrics.ignored_fields),
        Middleware(HeldModels),
    ]
