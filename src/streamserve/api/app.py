"""The application: every route over one generator."""

from fastapi import FastAPI

from streamserve import __version__
from streamserve.api.chat import chat_routes
from streamserve.api.completions import completion_routes
from streamserve.api.errors import install_error_handlers
from streamserve.api.generation import Door
from streamserve.api.generator import Generator
from streamserve.api.health import health_routes
from streamserve.api.metrics import Metrics
from streamserve.api.models import model_routes
from streamserve.api.settings import ApiSettings
from streamserve.protocol.sampling import SamplingParams


def create_app(llm: Generator, settings: ApiSettings | None = None) -> FastAPI:
    """OpenAI's API over `llm`, which may still be loading: until it is ready, /health says so and
    requests get 503. Raises TypeError if `settings.default_sampling` names a field there is not."""
    settings = settings or ApiSettings()
    SamplingParams(**settings.default_sampling)
    door = Door(llm, settings, Metrics(llm.served_names[0], llm.report))
    app = FastAPI(title="streamserve", version=__version__, redirect_slashes=False, redoc_url=None)
    install_error_handlers(app)
    app.include_router(completion_routes(door))
    app.include_router(chat_routes(door))
    app.include_router(model_routes(llm))
    app.include_router(health_routes(door))
    return app
