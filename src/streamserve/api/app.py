"""The FastAPI application: all routes over one generator."""

from fastapi import FastAPI

from streamserve import __version__
from streamserve.api.generation import AppContext
from streamserve.api.generator import Generator
from streamserve.api.http.auth import Authentication
from streamserve.api.http.cors import CORS
from streamserve.api.http.errors import install_error_handlers
from streamserve.api.http.limits import RequestMemory
from streamserve.api.http.memory import MemoryAccount
from streamserve.api.http.request_ids import RequestIds
from streamserve.api.http.unsupported_routes import unsupported_routes
from streamserve.api.openai.chat import chat_routes
from streamserve.api.openai.completions import completion_routes
from streamserve.api.openai.responses import response_routes
from streamserve.api.openai.tokenize import tokenize_routes
from streamserve.api.ops.admin import admin_routes
from streamserve.api.ops.docs import docs_routes
from streamserve.api.ops.health import health_routes
from streamserve.api.ops.metrics import Metrics
from streamserve.api.ops.models import model_routes
from streamserve.api.ops.openapi import install_description
from streamserve.api.ops.page import page_routes
from streamserve.api.ops.routing import router_routes
from streamserve.api.prompt_streams.routes import stream_routes
from streamserve.api.settings import ApiSettings
from streamserve.protocol.sampling import SamplingParams


def create_app(llm: Generator, settings: ApiSettings | None = None) -> FastAPI:
    """Build the application with OpenAI's API over `llm`.

    `llm` may still be loading: until it is ready, /health reports that and requests get 503. Raises TypeError
    if `settings.default_sampling` names an unknown field.
    """
    settings = settings or ApiSettings()
    SamplingParams(**settings.default_sampling)
    metrics = Metrics(llm.served_names[0], llm.report, llm.incidents)
    context = AppContext(llm, settings, metrics, MemoryAccount(settings.max_memory_bytes))
    metrics.memory.set_function(lambda: context.memory.held)
    app = FastAPI(
        title="streamserve", version=__version__, redirect_slashes=False, docs_url=None, redoc_url=None
    )
    install_description(app)
    app.state.drain = context.drain
    app.state.memory = context.memory
    install_error_handlers(app)
    # The middleware added first is the innermost: a request passes them from the last to the first.
    app.add_middleware(RequestMemory, account=context.memory)
    app.add_middleware(
        Authentication,
        keys=settings.api_keys,
        admin_keys=settings.admin_keys,
        max_requests_per_key=settings.max_requests_per_key,
    )
    app.add_middleware(CORS, origins=settings.cors_origins, local_only=settings.local_only)
    app.add_middleware(RequestIds)
    app.include_router(completion_routes(context))
    app.include_router(chat_routes(context))
    app.include_router(response_routes(context))
    app.include_router(stream_routes(context))
    app.include_router(tokenize_routes(context))
    app.include_router(model_routes(llm))
    app.include_router(router_routes(llm))
    app.include_router(health_routes(context))
    app.include_router(admin_routes(context.drain, llm))
    app.include_router(page_routes())
    app.include_router(docs_routes(app.openapi))
    app.include_router(unsupported_routes())
    return app
