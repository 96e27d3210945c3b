"""Calls routes within this process, so that a batch's requests take the same path to the engine as others."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import Message, Scope

from streamserve.api.context import AppContext
from streamserve.api.http.auth import with_caller
from streamserve.api.http.errors import ERROR_HANDLERS, error_body, error_headers
from streamserve.api.http.ignored_fields import FieldWarnings
from streamserve.api.http.limits import RequestMemory
from streamserve.api.http.request_ids import HEADER, RequestIds
from streamserve.api.leases import HeldModels, lease_of
from streamserve.api.routes import BoundRoute
from streamserve.extras.batches.lines import ENDPOINTS, PIECE, LineResponse, RequestLine, prepared_body
from streamserve.protocol.errors import RequestError

_log = logging.getLogger(__name__)

_BUSY, _UNAVAILABLE = 429, 503
_MAX_RETRIES = 10
"""Maximum number of retries of a request that gets status 503 although the model's workers are ready and the
server does not drain."""
_MAX_WAIT = 30.0
_PIECE = 32 << 10
"""Bytes of a body that a route gets at a time: all open requests of batches may get a piece in the same
iteration of the event loop."""
_FAILED = RequestError("the server failed to handle this request", status=500)


@dataclass(frozen=True)
class _Answer:
    """The answer of a route. `healthy`: whether its server can serve other requests."""

    status: int
    headers: Headers
    body: bytes
    healthy: bool

    @property
    def wait(self) -> float:
        """Seconds until the next attempt."""
        return min(float(self.headers.get("retry-after", "1")), _MAX_WAIT)


class Caller:
    """Answers requests of batches by calling the `endpoints` of a context that batches may use."""

    def __init__(self, context: AppContext, endpoints: Iterable[BoundRoute]) -> None:
        settings = context.settings
        self._context = context
        self._app = Starlette(
            routes=[endpoint.router_entry() for endpoint in endpoints if endpoint.route.path in ENDPOINTS],
            middleware=[
                Middleware(HeldModels),
                Middleware(RequestIds),
                Middleware(RequestMemory, account=context.memory),
                Middleware(
                    FieldWarnings, strict=settings.strict_fields, count=context.metrics.ignored_fields
                ),
            ],
            exception_handlers=ERROR_HANDLERS,
        )

    async def answer(self, line: RequestLine, owner: str) -> LineResponse:
        """Return the response to a request of `owner`, errors included.

        Waits as long as the server is loading, draining or full.
        """
        try:
            body = await self._context.side_thread.run_if(
                len(memoryview(line.body)) > PIECE, partial(prepared_body, line)
            )
        except (RequestError, ValueError, RecursionError) as error:
            refused = error if isinstance(error, RequestError) else RequestError(f"body: {error}")
            return LineResponse(refused.status, "", msgspec.Raw(error_body(refused)))
        retries = 0
        while True:
            answer = await self._answer(line.url, body, owner)
            _check_cancelled()
            if answer.status == _UNAVAILABLE and answer.healthy:
                retries += not self._context.drain.draining
            if answer.status not in (_BUSY, _UNAVAILABLE) or retries > _MAX_RETRIES:
                return LineResponse(answer.status, answer.headers.get(HEADER, ""), msgspec.Raw(answer.body))
            await asyncio.sleep(answer.wait)

    async def _answer(self, path: str, body: bytes, owner: str) -> _Answer:
        """Return the answer of the model that the body names. Waits until the model is loaded, without a
        limit."""
        requested = await self._context.side_thread.run_if(len(body) > PIECE, partial(_model_of, body))
        if not self._context.models.has(requested):  # the route refuses it
            return await self._call(path, body, owner, self._context)
        try:
            lease = await lease_of(self._context, requested, patient=True)
        except RequestError as error:
            return _Answer(error.status, Headers(error_headers(error)), error_body(error), healthy=True)
        try:
            return await self._call(path, body, owner, lease.context)
        finally:
            lease.release()

    async def _call(self, path: str, body: bytes, owner: str, context: AppContext) -> _Answer:
        status, headers, chunks = 500, Headers(), [error_body(_FAILED)]

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], Headers(raw=message["headers"])
                chunks.clear()
            else:
                chunks.append(message.get("body", b""))

        try:
            await self._app(_scope(path, body, owner), _receiving(body), send)
        except Exception as error:
            _log.error("a request of a batch failed", exc_info=error)
        return _Answer(status, headers, b"".join(chunks), context.llm.health().ready)


def _model_of(body: bytes) -> str | None:
    """Return the model that a request names. None if it names none, or if its route refuses the field."""
    try:
        return msgspec.json.decode(body, type=_NamedModel).model
    except (ValueError, RecursionError):
        return None


class _NamedModel(msgspec.Struct, frozen=True):
    model: str | None = None


def _check_cancelled() -> None:
    """Raise CancelledError if this task is cancelled. The routes turn a cancellation into a reply, as for a
    shutdown."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _scope(path: str, body: bytes, owner: str) -> Scope:
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": None,
    }
    return with_caller(scope, owner)


def _receiving(body: bytes) -> Callable[[], Awaitable[Message]]:
    """Return a function that receives `body` in pieces, and afterwards waits for ever: there is no
    disconnection."""
    pieces = [body[start : start + _PIECE] for start in range(0, len(body), _PIECE)]
    rest = iter(enumerate(pieces, start=1))

    async def receive() -> Message:
        for number, piece in rest:
            await asyncio.sleep(0)  # a piece takes a while to scan: let other tasks run in between
            return {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    return receive
