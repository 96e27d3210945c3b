"""The context shared by the routes and the WebSocket of prompt streams."""

from dataclasses import dataclass

from streamserve.api.context import AppContext
from streamserve.api.prompt_streams.idempotency import IdempotencyCache
from streamserve.api.prompt_streams.streams import PromptStreams


@dataclass(frozen=True)
class StreamContext:
    """The application context, its open prompt streams, and the cached replies for retries."""

    app: AppContext
    streams: PromptStreams
    idempotency_cache: IdempotencyCache


def stream_context(app: AppContext) -> StreamContext:
    """Return a new context without prompt streams, for the server's application context `app`."""
    return StreamContext(app, PromptStreams(app), IdempotencyCache())
