"""Errors in OpenAI's format, {"error": {"message", "type", "param", "code"}}, or in the format of the path's
API."""

import logging
import math

import msgspec
from msgspec import UNSET, UnsetType
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ExceptionHandler, Scope

from streamserve.api.http.error_format import format_of
from streamserve.api.http.near_paths import near_path, similar_path
from streamserve.protocol.errors import RequestError
from streamserve.text.prompt_chunks import StaleVersionError

_log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""The status of a reply whose client has disconnected."""


class ErrorDetail(msgspec.Struct, frozen=True):
    """The cause of an error, and the request field at fault. `version` is the current version of a prompt
    stream, if the request was made for an older one."""

    message: str
    type: str
    param: str | None
    code: str | None
    version: int | UnsetType = UNSET


class ErrorBody(msgspec.Struct, frozen=True):
    """An error as a response body or as an event of a stream."""

    error: ErrorDetail


def as_request_error(error: Exception) -> RequestError:
    """Return the error that the client sees.

    A RequestError is returned unchanged. Any other error is logged, and the client sees only a status of
    500.
    """
    if isinstance(error, RequestError):
        return error
    _log.error("a request failed", exc_info=error)
    return RequestError("the server failed to handle this request", status=500)


def error_body(error: RequestError) -> bytes:
    """Encode `error` as JSON."""
    kind = "invalid_request_error"
    if error.status >= 500:
        kind = "server_error"
    elif error.status == 429:
        kind = "rate_limit_error"
    code = "model_not_found" if (error.status, error.field) == (404, "model") else error.code
    if error.status == 401:
        code = "invalid_api_key"
    version: int | UnsetType = UNSET
    if isinstance(error, StaleVersionError):
        code, version = "stale_version", error.version
    return msgspec.json.encode(ErrorBody(ErrorDetail(error.message, kind, error.field, code, version)))


def error_headers(error: RequestError) -> dict[str, str]:
    """Return the Retry-After header, if the error has one."""
    return {} if error.retry_after is None else {"Retry-After": str(math.ceil(error.retry_after))}


def error_response(error: RequestError, scope: Scope) -> Response:
    """Build a complete response from `error`, in the format of the path in `scope`."""
    status, body = error.status, error_body(error)
    if format := format_of(scope):
        status, body = format.status(status), format.encode(error, scope["state"].get("request_id", ""))
    return Response(body, status, error_headers(error), "application/json")


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error, request.scope)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    near = (near_path(request) or similar_path(request)) if error.status_code == 404 else None
    message = {
        404: f"there is no route {request.method} {request.url.path}" + (f": use {near}" if near else ""),
        405: f"{request.url.path} does not take {request.method}",
    }.get(error.status_code, error.detail)
    response = error_response(RequestError(message, status=error.status_code), request.scope)
    response.headers.update(error.headers or {})
    return response


async def _disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _failed(request: Request, error: Exception) -> Response:
    """Respond with 500. Starlette then raises the error again; the server logs it and closes the
    connection."""
    failure = RequestError("the server failed to handle this request", status=500)
    response = error_response(failure, request.scope)
    response.headers["X-Request-Id"] = getattr(request.state, "request_id", "")
    response.headers["Connection"] = "close"
    return response


ERROR_HANDLERS: dict[type[Exception], ExceptionHandler] = {
    RequestError: _request_error,
    HTTPException: _no_route,
    ClientDisconnect: _disconnected,
    Exception: _failed,
}
"""The application's handlers: every error is returned in the format of the route."""
