"""The context of the Responses API: the application's context, and the responses that are kept."""

from dataclasses import dataclass

from streamserve.api.context import AppContext
from streamserve.extras.responses.response_store import ResponseStore


@dataclass(frozen=True)
class ResponseContext:
    """The context of the routes of responses. `stored` has the responses of all models."""

    app: AppContext
    stored: ResponseStore


def response_context(app: AppContext) -> ResponseContext:
    """Return the context of the routes, with an empty store."""
    settings = app.settings
    return ResponseContext(
        app,
        ResponseStore(
            settings.max_stored_responses, settings.max_stored_response_bytes, settings.stored_response_ttl
        ),
    )
