"""Every error in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

import logging
import math

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec import UNSET, UnsetType
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from streamserve.protocol.errors import RequestError
from streamserve.text.arriving import StaleVersionError

_log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""The status of a reply nobody is there to read."""


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong, and which field of the request is to blame. `version` is a prompt stream's current
    one, where the request was made for another."""

    message: str
    type: str
    param: str | None
    code: str | None
    version: int | UnsetType = UNSET


class ErrorBody(msgspec.Struct, frozen=True):
    """An error as a response body or as an event of a stream."""

    error: ErrorDetail


def as_request_error(error: Exception) -> RequestError:
    """What the client may know of `error`: nothing, unless it was meant for it. Then the log has the rest."""
    if isinstance(error, RequestError):
        return error
    _log.error("a request failed", exc_info=error)
    return RequestError("the server failed to handle this request", status=500)


def error_body(error: RequestError) -> bytes:
    """`error` as JSON."""
    kind = "invalid_request_error"
    if error.status >= 500:
        kind = "server_error"
    elif error.status == 429:
        kind = "rate_limit_error"
    code = "model_not_found" if (error.status, error.field) == (404, "model") else None
    if error.status == 401:
        code = "invalid_api_key"
    version: int | UnsetType = UNSET
    if isinstance(error, StaleVersionError):
        code, version = "stale_version", error.version
    return msgspec.json.encode(ErrorBody(ErrorDetail(error.message, kind, error.field, code, version)))


def error_headers(error: RequestError) -> dict[str, str]:
    """When to come back, where that helps."""
    return {} if error.retry_after is None else {"Retry-After": str(math.ceil(error.retry_after))}


def error_response(error: RequestError) -> Response:
    """`error` as a whole response."""
    return Response(error_body(error), error.status, error_headers(error), "application/json")


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` answer every error in this shape."""
    app.add_exception_handler(RequestError, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _failed)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {
        404: f"there is no route {request.method} {request.url.path}",
        405: f"{request.url.path} does not take {request.method}",
    }.get(error.status_code, error.detail)
    response = error_response(RequestError(message, status=error.status_code))
    response.headers.update(error.headers or {})
    return response


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _failed(request: Request, error: Exception) -> Response:
    """Starlette raises the error again after this reply; the server logs it and closes the connection."""
    response = error_response(RequestError("the server failed to handle this request", status=500))
    response.headers["X-Request-Id"] = getattr(request.state, "request_id", "")
    response.headers["Connection"] = "close"
    return response
