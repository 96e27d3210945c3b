"""All routes of Ollama's API."""

from streamserve.api.context import AppContext
from streamserve.api.routes import Route
from streamserve.extras.ollama.embedding import OLLAMA_EMBEDDING_ROUTES
from streamserve.extras.ollama.generating import GENERATING_ROUTES
from streamserve.extras.ollama.models import OLLAMA_MODEL_ROUTES
from streamserve.extras.ollama.unsupported import OLLAMA_UNSUPPORTED_ROUTES

OLLAMA_ROUTES: tuple[Route[AppContext], ...] = (
    *GENERATING_ROUTES,
    *OLLAMA_EMBEDDING_ROUTES,
    *OLLAMA_MODEL_ROUTES,
    *OLLAMA_UNSUPPORTED_ROUTES,
)
